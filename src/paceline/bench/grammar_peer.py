"""xgrammar on the same schemas, texts and tokenizer, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import time
from typing import Any

import torch

from paceline.bench.schemas import Schema
from paceline.models.tokenizer import Tokenizer


def has_xgrammar() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class XGrammar:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import xgrammar

        self._library: Any = xgrammar
        tokens = [tokenizer.token_bytes(token) or b"" for token in range(vocab_size)]
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size,
                                      stop_token_ids=sorted(tokenizer.eos_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size
        self._eos = tokenizer.eos_ids
        self.refused = 0
        self.forbidden = 0
        """Texts, valid by their schema, of which it forbids a token."""

    def measure(self, schemas: dict[str, Schema], texts: list[list[int]]) -> tuple[list[float], list[float]]:
        """Seconds of each compilation and of each mask along the texts."""
        compiling: list[float] = []
        masking: list[float] = []
        bits = self._library.allocate_token_bitmask(1, self._vocab_size)
        for schema, tokens in zip(schemas.values(), texts):
            started = time.perf_counter()
            try:
                compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
            except Exception:
                self.refused += 1
                continue
            compiling.append(time.perf_counter() - started)
            masking += self._walk(self._library.GrammarMatcher(compiled), tokens, bits)
        return compiling, masking

    def _walk(self, matcher: Any, tokens: list[int], bits: torch.Tensor) -> list[float]:
        seconds = []
        for token in tokens:
            started = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            seconds.append(time.perf_counter() - started)
            if token in self._eos:
                break
            if not matcher.accept_token(token):
                self.forbidden += 1
                break
        return seconds
