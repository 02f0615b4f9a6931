"""Requests whose prompts are equal: while one of them is loading, the others wait for its blocks.

In:  the prompt key of each load as it begins and ends.
Out: whether another request is loading an equal prompt now.
Law: every question takes the same short time, however many requests wait: it is asked for each of them in every step.
"""

from kv_core.ids import RequestId
from kv_core.keys import BlockKey


class Twins:
    """The loads under way, by what they load."""

    def __init__(self) -> None:
        self._loading: dict[BlockKey, set[RequestId]] = {}

    def begins(self, request_id: RequestId, prompt_key: BlockKey) -> None:
        """This request is loading its prompt."""
        self._loading.setdefault(prompt_key, set()).add(request_id)

    def ends(self, request_id: RequestId, prompt_key: BlockKey) -> None:
        """It is not, any more; idempotent."""
        loading = self._loading.get(prompt_key, set())
        loading.discard(request_id)
        if not loading:
            self._loading.pop(prompt_key, None)

    def is_loading(self, prompt_key: BlockKey | None, besides: RequestId) -> bool:
        """Whether a request other than `besides` is loading this prompt."""
        loading = self._loading.get(prompt_key) if prompt_key is not None else None
        return loading is not None and (len(loading) > 1 or besides not in loading)

    def check(self) -> None:
        """Proves the invariants; for tests."""
        assert all(self._loading.values()), "law: a prompt that is loading has a request that loads it"

    def __len__(self) -> int:
        """Prompts that are being loaded."""
        return len(self._loading)
