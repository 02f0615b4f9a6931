"""What the tiers tell, in vLLM's format of KV events, for its publisher.

In:  `BlocksStored` and `BlocksRemoved`.
Out: vLLM's BlockStored and BlockRemoved: medium "CPU" for host memory and "STORAGE" for the disk, as its own connectors
     call them; hashes, parents, tokens and extra keys as in its events of the device ("GPU"), which readers match.

Tiers keep no prefix of an adapter, so `lora_id` and `lora_name` are always None.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kv_engine_adapter.tier_events import BlocksRemoved, BlocksStored, Medium, TierEvent
from kv_engine_adapter.vllm import compat

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

_MEDIA = {Medium.HOST: "CPU", Medium.DISK: "STORAGE"}


def published(events: Iterable[TierEvent], tokens_per_block: int, group: int = 0) -> "list[KVCacheEvent]":
    """The same in vLLM's words, as blocks of one of its cache groups."""
    return [
        _removed(event, group) if isinstance(event, BlocksRemoved) else _stored(event, tokens_per_block, group)
        for event in events
    ]


def _stored(event: BlocksStored, tokens_per_block: int, group: int) -> BlockStored:
    fields = {
        "block_hashes": [maybe_convert_block_hash(name.hash) for name in event.names],
        "parent_block_hash": None if event.parent is None else maybe_convert_block_hash(event.parent),
        "token_ids": list(event.tokens),
        "block_size": tokens_per_block,
        "lora_id": None,
        "lora_name": None,
        "medium": _MEDIA[event.medium],
        "extra_keys": compat.published_keys([name.extra_keys for name in event.names]),
        "group_idx": group,
    }
    return BlockStored(**compat.known_fields(BlockStored, fields))


def _removed(event: BlocksRemoved, group: int) -> BlockRemoved:
    hashes = [maybe_convert_block_hash(each) for each in event.hashes]
    fields = {"block_hashes": hashes, "medium": _MEDIA[event.medium], "group_idx": group}
    return BlockRemoved(**compat.known_fields(BlockRemoved, fields))
