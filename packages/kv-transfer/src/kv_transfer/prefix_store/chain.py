"""The keys of a prompt's records: full ones, and the shorter ones in which a prompt may end.

In:  the tokens of a request and its Scope; tokens per record, the store's own and no engine's.
Out: a key for each record of the prompt, full or cut short anywhere.
Law: keys are those of `kv_core.keys`, so a key names all tokens up to its record's end; equal prompts have equal keys
whatever the block size of the engine that asks.
"""

from collections.abc import Iterator, Sequence

from kv_core.errors import CallerError
from kv_core.keys import TOKEN_BYTES, BlockKey, Scope, block_keys, chain_keys, encoded_items, scope_key
from kv_core.spans import Span, ceil_div


class PrefixChain:
    """The keys of one prompt."""

    def __init__(self, tokens: Sequence[int], scope: Scope, tokens_per_record: int) -> None:
        """CallerError as `block_keys`."""
        self.tokens_per_record = tokens_per_record
        self.num_tokens = len(tokens)
        self._full = block_keys(tokens, scope, tokens_per_record)
        self._extras = scope.extras
        self._content = b"".join(token.to_bytes(TOKEN_BYTES, "little", signed=True) for token in tokens)
        self._root = scope_key(scope)

    def key(self, ordinal: int, num_tokens: int) -> BlockKey:
        """The key of the first `num_tokens` of a record; CallerError if the prompt has fewer there."""
        start = ordinal * self.tokens_per_record
        if not (0 < num_tokens <= self.tokens_per_record and 0 <= start <= self.num_tokens - num_tokens):
            raise CallerError(
                f"the prompt has no such record: ordinal={ordinal}, tokens={num_tokens}, prompt={self.num_tokens}"
            )
        if num_tokens == self.tokens_per_record:
            return self._full[ordinal]
        parent = self._full[ordinal - 1] if ordinal else self._root
        content = self._content[start * TOKEN_BYTES : (start + num_tokens) * TOKEN_BYTES]
        block_bytes = self.tokens_per_record * TOKEN_BYTES
        begun = Scope(extras=tuple(item for item in self._extras if item[1] < start + num_tokens))
        items = encoded_items(begun, self.tokens_per_record)
        return chain_keys(parent, content, block_bytes, Span(ordinal, ordinal + 1), items)[0]

    def records(self, tokens: Span) -> Iterator[tuple[Span, BlockKey]]:
        """The records that begin within `tokens`, each with all of its tokens; the last one may be cut short.

        CallerError if the prompt is shorter.
        """
        self.check(tokens)
        size = self.tokens_per_record
        for ordinal in Span(
            ceil_div(tokens.start, size), max(ceil_div(tokens.start, size), ceil_div(tokens.stop, size))
        ):
            record = Span(ordinal * size, min((ordinal + 1) * size, tokens.stop))
            yield record, self.key(ordinal, len(record))

    def candidates(self, ordinal: int) -> Iterator[tuple[Span, BlockKey]]:
        """The records that may hold tokens of this ordinal, the longest first: another prompt may have ended there."""
        start = ordinal * self.tokens_per_record
        for num_tokens in range(min(self.tokens_per_record, self.num_tokens - start), 0, -1):
            yield Span(start, start + num_tokens), self.key(ordinal, num_tokens)

    def check(self, tokens: Span) -> None:
        """CallerError if the prompt does not have these tokens."""
        if tokens.start < 0 or tokens.stop > self.num_tokens:
            raise CallerError(f"the prompt does not have these tokens: wanted={tokens}, prompt={self.num_tokens}")
