"""How much text a token can stand for: by it a text that cannot fit is refused before anybody has tokenised it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSED = 4
"""Characters that normalising composes to one, at most: no character has a longer canonical decomposition."""
_KEEP = {"NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1, "NFC": _COMPOSED, "NFKC": _COMPOSED}
"""Normalizers, and how many characters each may make one of. Others may leave characters out (Strip, StripAccents,
BertNormalizer, Nmt, Precompiled), as many as there are."""
_CUT = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
"""Pre-tokenizers that cut a text and drop nothing of it. Others drop the spaces between words."""


def characters_a_token(backend: Any) -> int | None:
    """The most characters of a text that one token of this `tokenizers` object can stand for; None: there is no such
    number, since something on the way may drop characters or make one token of any number of them.

    The bound must never refuse what would fit, so a part that is not known here counts as one that drops text.
    """
    state = json.loads(backend.to_str())
    shrinking = math.prod(_shrinking(step) for step in _steps(state["normalizer"], "normalizers"))
    cuts = all(map(_keeps_all, _steps(state["pre_tokenizer"], "pretokenizers")))
    swallows = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    if math.isinf(shrinking) or not cuts or swallows or not _tokenises_all(state):
        return None
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    return math.ceil(longest * max(1.0, shrinking))


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


def _keeps_all(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _CUT


def _tokenises_all(state: Mapping[str, Any]) -> bool:
    """Whether every character becomes a token or a part of one that is in the vocabulary. (Characters that are unknown
    may be dropped, or any number of them be one unknown token.)"""
    model = state["model"]
    vocab = model["vocab"]
    known = vocab.keys() if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    kinds = {step["type"] for name, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
             for step in _steps(state[name], inner)}
    if model["type"] not in ("BPE", "Unigram"):
        return False
    if "ByteLevel" in kinds:
        from tokenizers.pre_tokenizers import ByteLevel

        return known >= set(ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return known >= {f"<0x{byte:02X}>" for byte in range(256)}
    return model["type"] == "BPE" and model.get("unk_token") in known and not model.get("fuse_unk")
