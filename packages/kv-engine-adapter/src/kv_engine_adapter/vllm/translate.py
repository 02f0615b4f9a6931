"""vLLM's words into ours: requests, parallel layout, model identity.

In:  vLLM's request and configuration objects.
Out: `RequestView`s for the scheduler side, `ParallelLayout` and fingerprint for the CacheState.
Law: nothing here keeps a vLLM object longer than the call, except the view of a request while it is looked at.
"""

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kv_core.errors import CallerError
from kv_core.ids import RequestId
from kv_core.keys import BlockKey, Scope, prompt_key
from kv_core.spans import Span
from kv_engine_adapter.fingerprint import model_fingerprint, read_config
from kv_engine_adapter.handover import wants_load, wants_offer
from kv_engine_adapter.orders import Tables
from kv_engine_adapter.ports import ScheduledRequest
from kv_engine_adapter.tier_events import BlockName
from kv_engine_adapter.vllm import compat
from kv_transfer.plan.cache_state import ParallelLayout
from kv_transfer.plan.ranges import HOLE

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# vLLM names the requests of one completion call `cmpl-<id>-<prompt>`, the children of `n` > 1 `<child>_<id>`, and adds
# eight random digits to each (0.25 to 0.32).
_CHILD = re.compile(r"^\d+_")
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_ORDINAL = re.compile(r"^(cmpl-.+)-\d+$")


def block_tables(block_ids: Sequence[Sequence[int]]) -> Tables:
    """vLLM's block ids by group as our tables: its block 0 holds nothing, and stands where a window has moved on."""
    return tuple(tuple(block or HOLE for block in table) for table in block_ids)


@dataclass(slots=True)  # Why not frozen: made for every waiting request in every step, it would cost twice as much.
class RequestView:
    """What the scheduler side reads of a vLLM request."""

    request: "Request"

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.request.request_id)

    @property
    def family(self) -> str:
        return request_family(self.request.request_id)

    @property
    def params(self) -> Mapping[str, object] | None:
        params = self.request.kv_transfer_params
        return params if isinstance(params, (dict, Mapping)) else None  # dict first: it is many times as fast

    @property
    def is_prefill(self) -> bool:
        """Computed here to be offered, not loaded."""
        return wants_offer(self.params) and not wants_load(self.params)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    @property
    def is_rejected(self) -> bool:
        return bool(getattr(self.request, "abort_immediately", False))

    @property
    def needs_every_token(self) -> bool:
        return bool(getattr(self.request, "skip_reading_prefix_cache", False))

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)

    def all_tokens(self) -> Sequence[int]:
        tokens: Sequence[int] = self.request.all_token_ids
        return tokens

    @property
    def arguments(self) -> Mapping[str, object] | None:
        found = getattr(self.request.sampling_params, "extra_args", None)
        return found if isinstance(found, Mapping) else None

    def scope(self) -> Scope | str:
        if self.request.prompt_token_ids is None or getattr(self.request, "prompt_embeds", None) is not None:
            return "it has no token ids (embeddings)"
        if self.request.lora_request is not None:
            # Why: two engines know an adapter by its name alone, and one name may stand for different weights.
            return f"it uses the LoRA adapter {self.request.lora_request.lora_name!r}"
        return _scope(self.request)

    def block_names(self, tokens_per_block: int, hashes_per_block: int) -> Sequence[BlockName]:
        request = self.request
        hashes = request.block_hashes[hashes_per_block - 1 :: hashes_per_block]  # each covers all before it
        if not (request.cache_salt or request.mm_features):
            return [BlockName(each) for each in hashes]
        return list(map(BlockName, hashes, compat.extra_keys(request, tokens_per_block)))

    def prompt_key(self) -> BlockKey | str:
        scope = self.scope()
        return scope if isinstance(scope, str) else prompt_key(self.request.prompt_token_ids or (), scope)


def may_want_load(params: object) -> bool:
    """Whether a view of a request with such parameters is worth its cost, to see if it wants a load."""
    return wants_load(params) if isinstance(params, dict) else bool(params)


def scheduled_requests(output: "SchedulerOutput", wanted: Container[RequestId]) -> list[ScheduledRequest]:
    """What this step computes of the wanted requests. vLLM counts the step's own tokens only after it."""
    numbers, again = output.num_scheduled_tokens, output.scheduled_cached_reqs
    new = [(each.req_id, each.num_computed_tokens, each.block_ids) for each in output.scheduled_new_reqs]
    old = zip(again.req_ids, again.num_computed_tokens, again.new_block_ids, strict=True)
    return [
        ScheduledRequest(RequestId(name), num_computed, numbers.get(name, 0), block_tables(block_ids or ()))
        for name, num_computed, block_ids in (*new, *old)
        if name in wanted
    ]


def request_family(request_id: str) -> str:
    """The client call a request belongs to; the request's own name when that cannot be told."""
    name = _RANDOM_SUFFIX.sub("", _CHILD.sub("", request_id))
    match = _PROMPT_ORDINAL.match(name)
    return match[1] if match else name


def _scope(request: "Request") -> Scope:
    extras = tuple(
        (hashlib.sha256(str(feature.identifier).encode()).digest(), int(feature.mm_position.offset))
        for feature in request.mm_features or ()
    )
    return Scope(salt=request.cache_salt, extras=extras)


def parallel_layout(config: "VllmConfig") -> ParallelLayout:
    """How the model's KV heads and layers are cut over the ranks of this engine."""
    from vllm.distributed.utils import get_pp_indices

    model, parallel = config.model_config, config.parallel_config
    num_layers = model.get_total_num_hidden_layers()
    stages = parallel.pipeline_parallel_size
    layers = tuple(Span(*get_pp_indices(num_layers, stage, stages)) for stage in range(stages))
    tensor_ranks = parallel.tensor_parallel_size
    # Why: of latent attention each rank keeps the one row that all heads are made from.
    num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    per_rank = max(1, num_heads // tensor_ranks)
    copies = max(1, tensor_ranks // num_heads)
    heads = tuple(Span(rank // copies * per_rank, (rank // copies + 1) * per_rank) for rank in range(tensor_ranks))
    return ParallelLayout(layers=layers, heads=heads)


def fingerprint(config: "VllmConfig") -> str:
    """The digest of the served model; see `kv_engine_adapter.fingerprint`."""
    model, load = config.model_config, config.load_config
    overrides = getattr(model, "hf_overrides", None)
    made_up = str(load.load_format) in ("dummy", "LoadFormat.DUMMY")
    # Why without the type of the elements: a CacheState tells it, and two types may be converted.
    extra = {
        "quantization": str(model.quantization),
        "overrides": None if callable(overrides) else overrides,
        "made_up": (model.seed, str(model.dtype)) if made_up else None,
    }
    directory = _checkpoint(model, load.download_dir)
    return model_fingerprint(read_config(directory), None if made_up else directory, extra=extra)


def _checkpoint(model: "ModelConfig", download_dir: str | None) -> Path:
    """The local directory of the model's files; `CallerError` if there is none."""
    path = Path(model.model)
    if path.exists():
        return path if path.is_dir() else path.parent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise CallerError(
            f"the files of model {model.model!r} are not on this machine, so its fingerprint cannot be made: {error}"
        ) from error
