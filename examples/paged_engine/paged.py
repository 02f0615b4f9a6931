"""Attention over blocks: keys and values are written to slots and read from slots, and nothing else is kept.

In:  for each sequence of a batch the tokens to compute, and for each window the slot of every position.
Out: an `Attention` for one forward pass.
Law: a slot is written before it is read, by one row of the batch only; what a query reads has a slot.

Legend: as in `llama`; a plane is [slots, tokens per block, K, D].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kv_transfer.block_pools import BlockPools
from paged_engine.llama import Llama, Rows, attend_masked, reads

Slots = Mapping[int, Sequence[int | None]]
"""For each window of the manager the device slot of the block of each position; None where there is none any more."""


@dataclass(frozen=True, slots=True)
class Query:
    """Tokens of one sequence to compute, from position `start` on.

    `read` covers all positions up to the last of them. `written` are the tables that get their keys and values: one, or
    those of all beams while these are alike.
    """

    tokens: Sequence[int]
    start: int
    adapter: str | None
    read: Slots
    written: Sequence[Slots]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


def run_paged(model: Llama, pools: BlockPools, queries: Sequence[Query]) -> list[Tensor]:
    """One forward pass; for each query the logits [tokens, V]."""
    positions = [range(query.start, query.stop) for query in queries]
    rows = Rows(
        torch.tensor(list(chain.from_iterable(query.tokens for query in queries)), device=model.device),
        torch.tensor(list(chain.from_iterable(positions)), device=model.device),
        tuple(query.adapter for query in queries for _ in query.tokens),
    )
    logits = model.logits(rows, PagedAttention(model, pools, queries))
    return list(torch.split(logits, [len(query.tokens) for query in queries]))


class PagedAttention:
    """Where one batch writes and reads, worked out once for each window."""

    def __init__(self, model: Llama, pools: BlockPools, queries: Sequence[Query]) -> None:
        self._pools = pools
        self._size = pools.pools[0].shape.tokens_per_block
        self._lengths = [len(query.tokens) for query in queries]
        self._windows = [pools.window_of(layer) for layer in range(model.shape.num_layers)]
        self._reads = {
            (pools.window_of(layer), window): self._reading(model, queries, pools.window_of(layer), window)
            for layer, window in enumerate(model.windows)
        }
        self._model_windows = model.windows
        self._writes = {window: self._writing(model, queries, window) for window in pools.windows}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window = self._windows[layer]
        rows, slots, offsets = self._writes[window]
        key_plane, value_plane = self._pools.planes(layer)
        key_plane[slots, offsets] = keys[rows]
        value_plane[slots, offsets] = values[rows]
        slots, offsets, mask = self._reads[window, self._model_windows[layer]]
        padded = torch.nn.utils.rnn.pad_sequence(list(torch.split(queries, self._lengths)), batch_first=True)
        found = attend_masked(padded, key_plane[slots, offsets], value_plane[slots, offsets], mask)
        return torch.cat([one[:length] for one, length in zip(found, self._lengths, strict=True)])

    def _reading(
        self, model: Llama, queries: Sequence[Query], window: int, looks_back: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Slots and offsets [B, S] of all keys, and which of them each query reads, [B, Q, S]."""
        num_queries, num_keys = max(self._lengths), max(query.stop for query in queries)
        slots = torch.tensor([_padded(query.read[window], num_keys) for query in queries])
        starts = torch.tensor([query.start for query in queries])
        asked = starts[:, None] + torch.arange(num_queries)
        mask = reads(asked, torch.arange(num_keys).expand(len(queries), -1), looks_back)
        exists = asked < torch.tensor([query.stop for query in queries])[:, None]
        assert not (mask & exists[:, :, None] & (slots < 0)[:, None, :]).any(), "law: what a query reads has a slot"
        mask[:, :, 0] |= ~exists  # a padding row reads anything, so that its softmax is defined
        offsets = (torch.arange(num_keys) % self._size).expand_as(slots)
        return slots.clamp(min=0).to(model.device), offsets.to(model.device), mask.to(model.device)

    def _writing(self, model: Llama, queries: Sequence[Query], window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, and the slots and offsets that get their keys and values."""
        writes = list(self._writes_of(queries, window))
        places = {(slot, offset) for _, slot, offset in writes}
        assert len(places) == len(writes), "law: one row writes a place"
        rows, slots, offsets = torch.tensor(writes, device=model.device).unbind(1)
        return rows, slots, offsets

    def _writes_of(self, queries: Sequence[Query], window: int) -> Iterator[tuple[int, int, int]]:
        row = 0
        for query in queries:
            for position in range(query.start, query.stop):
                for slot in {table[window][position] for table in query.written}:
                    assert slot is not None, "law: what is computed has a slot"
                    yield row, slot, position % self._size
                row += 1


def _padded(slots: Sequence[int | None], length: int) -> list[int]:
    return [-1 if slot is None else slot for slot in slots] + [-1] * (length - len(slots))
