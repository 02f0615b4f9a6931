"""The `kv_transfer_params` of a request, as existing routers pass them from a prefill to a decode engine.

In:  the untrusted mapping a client or router sent.
Out: what was asked for, checked; or the reason why it cannot be honoured, naming the field.
Law: nothing here is believed beyond its type and range. An offer is found by its random id and the digest of the
     prompt; block ids are neither read nor written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kv_core.errors import CallerError
from kv_core.ids import Incarnation, InstanceId, RequestId, TransferId
from kv_core.keys import BlockKey
from kv_engine_adapter.known_peers import KnownPeers
from kv_engine_adapter.ports import RequestView
from kv_transfer.agent.cards import MAX_NAME_CHARS

_TRANSFER_ID = re.compile(r"[0-9a-f]{32}")
_MAX_PORT_DIGITS = 5


class HandoverError(CallerError):
    """A hand-over that cannot be honoured as sent; the request is computed here instead."""


@dataclass(frozen=True, slots=True)
class RemoteOffer:
    """Where a decode request finds the KV of its prompt."""

    transfer_id: TransferId
    host: str
    port: int
    incarnation: Incarnation | None


@dataclass(frozen=True, slots=True)
class OfferTicket:
    """What a prefill engine answers with, so that a decode engine finds the offer."""

    transfer_id: TransferId
    request_id: RequestId
    instance: InstanceId
    incarnation: Incarnation
    host: str
    port: int
    num_tokens: int
    tensor_ranks: int
    pipeline_stages: int

    def as_params(self) -> dict[str, object]:
        """The answer in the keys of vLLM's NIXL connectors, ours added; `remote_block_ids` stays empty on purpose."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [],
            "remote_engine_id": self.instance,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tensor_ranks,
            "pp_size": self.pipeline_stages,
            "remote_num_tokens": self.num_tokens,
            "transfer_id": self.transfer_id,
            "remote_incarnation": self.incarnation,
        }


def wants_offer(params: Mapping[str, object] | None) -> bool:
    """Whether the request is a prefill whose KV another engine will fetch."""
    return bool(params and params.get("do_remote_decode"))


def wants_load(params: Mapping[str, object] | None) -> bool:
    """Whether the KV of the prompt is to be fetched from another engine."""
    return bool(params and params.get("do_remote_prefill"))


def chosen_transfer(params: Mapping[str, object] | None) -> TransferId | None:
    """The transfer id that a client chose for its prefill request, if it did; `HandoverError` if it is none.

    It is no secret: whoever guesses it still has to name the digest of the prompt.
    """
    if not params or params.get("transfer_id") is None:
        return None
    return _transfer_id(params)


def remote_offer(params: Mapping[str, object], peers: KnownPeers) -> RemoteOffer:
    """The offer the parameters name; `HandoverError` names the field that is missing or wrong, or the strange host."""
    transfer_id = _transfer_id(params)
    host = _text(params, "remote_host")
    if not peers.allows(host):
        raise HandoverError(f"kv_transfer_params.remote_host: {host!r} is none of the configured peers ({peers})")
    incarnation = params.get("remote_incarnation")
    return RemoteOffer(
        transfer_id=transfer_id,
        host=host,
        port=_port(params),
        incarnation=None if incarnation is None else Incarnation(_text(params, "remote_incarnation")),
    )


def key_to_load(request: RequestView) -> BlockKey:
    """Which prompt an offer must hold to be loaded for this request; `HandoverError` if that cannot be told."""
    key = request.prompt_key()
    if isinstance(key, str):
        raise HandoverError(f"no offer can be proven to hold its prompt: {key}")
    return key


def _transfer_id(params: Mapping[str, object]) -> TransferId:
    transfer_id = _text(params, "transfer_id")
    if not _TRANSFER_ID.fullmatch(transfer_id):
        raise HandoverError(f"kv_transfer_params.transfer_id: expected 32 lower-case hex digits, got {transfer_id!r}")
    return TransferId(transfer_id)


def _port(params: Mapping[str, object]) -> int:
    port = params.get("remote_port")
    if isinstance(port, str) and len(port) <= _MAX_PORT_DIGITS and port.isascii() and port.isdecimal():
        port = int(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise HandoverError(f"kv_transfer_params.remote_port: expected 1 to 65535, got {port!r:.80}")
    return port


def _text(params: Mapping[str, object], field: str) -> str:
    value = params.get(field)
    if value is None:
        raise HandoverError(f"kv_transfer_params.{field}: missing; got the fields {sorted(map(str, params))!s:.200}")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise HandoverError(
            f"kv_transfer_params.{field}: expected text of 1 to {MAX_NAME_CHARS} characters, got {value!r:.80}"
        )
    return value
