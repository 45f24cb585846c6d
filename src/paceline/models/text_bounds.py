"""How much text a token can stand for: by it a text that cannot fit is refused before anybody has tokenised it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.models.detokenizer import UNMAPPED, latin_of_byte_characters

_COMPOSED = 4
"""Characters that normalising composes to one, at most: no character has a longer canonical decomposition."""
_KEEP = {"NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED}
"""Normalizers, and how many characters each may make one of. Others may leave characters out (Strip, StripAccents,
BertNormalizer, Nmt, Precompiled), as many as there are."""
_CUT = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
"""Pre-tokenizers that cut a text and drop nothing of it. Others drop the spaces between words."""


class TextBound(NamedTuple):
    """How much text tokens can stand for."""

    each: int
    """The most characters that one token can."""
    dropped: tuple[str, ...] = ()
    """Characters that become no token at all: vocabularies lack some that nobody writes."""

    def holds(self, text: str, tokens: int) -> bool:
        """False: the text cannot have as few tokens. Never for one that has, whatever is in it."""
        most = self.each * tokens
        return len(text) <= most or len(text) - sum(map(text.count, self.dropped)) <= most


def text_bound(backend: Any) -> TextBound | None:
    """That of a `tokenizers` object; None: there is none, since something on the way may drop characters or make one
    token of any number of them.

    The bound must never refuse what would fit, so a part that is not known here counts as one that drops text.
    """
    state = json.loads(backend.to_str())
    normalizers = list(_steps(state["normalizer"], "normalizers"))
    shrinking = math.prod(map(_shrinking, normalizers))
    cuts = all(map(_keeps_all, _steps(state["pre_tokenizer"], "pretokenizers")))
    swallows = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    dropped = _dropped(state)
    if math.isinf(shrinking) or not cuts or swallows or dropped is None:
        return None
    if any(_may_become(step, one) for step in normalizers for one in dropped):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return TextBound(math.ceil(longest * max(1.0, shrinking)), dropped)


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from _steps(step, inner)
    else:
        yield part


def _shrinking(step: Mapping[str, Any]) -> float:
    """How many characters this normalizer may make one of."""
    if step["type"] == "Replace":
        old, new = step["pattern"].get("String", ""), step["content"]
        return max(1.0, len(old) / len(new)) if old and new else math.inf  # an expression may match anything
    return _KEEP.get(step["type"], math.inf)


def _may_become(step: Mapping[str, Any], dropped: str) -> bool:
    """Whether this normalizer may make such a character of others: a small letter of a capital one, a K of the sign of
    Kelvins. It is no control character, unless one is written by name."""
    return step["type"] in ("Replace", "Prepend") or (step["type"] != "ByteLevel" and dropped.isprintable())


def _keeps_all(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _CUT


def _dropped(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Characters of which nothing is in the vocabulary; every other one becomes a token or a part of one. None: any
    number of unknown characters may be one token."""
    model = state["model"]
    vocab = model["vocab"]
    known = vocab.keys() if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    kinds = {step["type"] for name, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
             for step in _steps(state[name], inner)}
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if "ByteLevel" in kinds:
        missing = [ord(latin) for written, latin in latin_of_byte_characters().items()
                   if latin != UNMAPPED and written not in known]
        if any(0x80 <= byte < 0xC0 for byte in missing):  # else a character of several bytes leaves one of its last
            return None
        return tuple(chr(byte) for byte in missing if byte < 0x80)
    if model.get("byte_fallback"):
        return () if known >= {f"<0x{byte:02X}>" for byte in range(256)} else None
    return () if model["type"] == "BPE" and model.get("unk_token") in known and not model.get("fuse_unk") else None
