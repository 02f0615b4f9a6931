"""A reader of vLLM's KV events, written against vLLM's documentation alone: ZMQ subscription, msgpack, field names.

In:  an engine's event port.
Out: for each medium, how much of a prompt is there, found as a router finds it: from parent to block by tokens.
Law: batches are numbered without gaps; a gap is an AssertionError, since what was lost is not known.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

JOIN_S = 0.5
"""A subscription takes a moment to reach a publisher that is there; what is published before is lost."""

Hash = int | bytes
Place = tuple[Hash | None, tuple[int, ...]]
"""A block by its parent and its tokens."""


class Subscriber:
    """One subscription; `hear` takes what has come."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._next: int | None = None
        self._places: dict[Hash, Place] = {}
        self._held: dict[str, dict[Place, Hash]] = {}
        self.kinds: set[tuple[str, str | None]] = set()
        """Kinds of events that came, with their media."""

    def __enter__(self) -> "Subscriber":
        time.sleep(JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)

    def hear(self, timeout_s: float = 0.2) -> "Subscriber":
        """Take what has come, until nothing comes for so long."""
        while self._socket.poll(1000 * timeout_s):
            _, number, payload = self._socket.recv_multipart()
            at = int.from_bytes(number, "big")
            assert self._next in (None, at), f"batches were lost: expected={self._next}, got={at}"
            self._next = at + 1
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._apply(event)
        return self

    def prefix(self, tokens: Sequence[int], medium: str) -> list[Hash]:
        """The hashes of the blocks of a prompt that lie in this medium, from the first to the first that does not."""
        held = self._held.get(medium, {})
        size = max((len(place[1]) for place in held), default=1)
        found: list[Hash] = []
        for start in range(0, len(tokens) - size + 1, size):
            block = held.get((found[-1] if found else None, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
        return found

    def _apply(self, event: dict[str, Any]) -> None:
        self.kinds.add((event["type"], event.get("medium")))
        if event["type"] == "AllBlocksCleared":
            self._held.clear()
            return
        held = self._held.setdefault(event["medium"], {})
        if event["type"] == "BlockRemoved":
            for each in event["block_hashes"]:
                held.pop(self._places[each], None)
            return
        parent, size = event["parent_block_hash"], event["block_size"]
        for at, each in enumerate(event["block_hashes"]):
            place = parent, tuple(event["token_ids"][at * size : (at + 1) * size])
            assert self._places.setdefault(each, place) == place, "one hash names one block"
            held[place] = parent = each
