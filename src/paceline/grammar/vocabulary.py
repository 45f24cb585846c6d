"""Vocabulary: what grammars need to know of a tokenizer, and spelling in its tokens that can be relied on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property


class Vocabulary:
    def __init__(self, tokens: Sequence[bytes | None], encode: Callable[[str], list[int]]) -> None:
        """`tokens`: the bytes each id adds to a text, None for ids that add none (special tokens, ends of text, gaps).
        `encode`: the tokenizer's, of texts that stand in the middle of others."""
        self.tokens = tokens
        self._encode = encode

    def __len__(self) -> int:
        return len(self.tokens)

    def spell(self, text: str) -> list[int]:
        """Ids whose bytes together are `text`: the tokenizer's own where it keeps to that. It does not where it
        normalises a text; then the longest tokens that fit."""
        wanted = text.encode()
        ids = self._encode(text)
        if b"".join(self.tokens[token] or b"" for token in ids if token < len(self.tokens)) == wanted:
            return ids
        ids, at = [], 0
        while at < len(wanted):
            piece = next((wanted[at:end] for end in range(min(len(wanted), at + self._longest), at, -1)
                          if wanted[at:end] in self._ids), None)
            if piece is None:
                return ids
            ids.append(self._ids[piece])
            at += len(piece)
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        ids: dict[bytes, int] = {}
        for token, data in enumerate(self.tokens):
            if data:
                ids.setdefault(data, token)
        return ids

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)
