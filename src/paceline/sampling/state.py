"""SampleState: what the processors must remember about one sequence, kept up to date token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.sampling.dense import FLOAT_MAX

GREEDY_BELOW = 1e-10
"""Temperatures under this are greedy: the noise is below one unit in the last place of logit / temperature anyway."""

_TINY = float(np.finfo(np.float32).tiny)


def tokenise_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Token sequences to keep out: each word as given and with a space before it, without repeats.

    `encode` must add no special tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word,) if word.startswith(" ") else (word, " " + word):
            tokens = tuple(encode(text))
            if tokens:
                sequences[tokens] = None
    return list(sequences)


class TokenCounts:
    """How often each token has come up, sparse: parallel growing arrays of ids and float32 counts."""

    __slots__ = ("_at", "_counts", "_ids")

    def __init__(self, uncounted: Iterable[int] = ()) -> None:
        """`uncounted` tokens are listed from the start with a count of zero."""
        first = list(dict.fromkeys(uncounted))
        self._at = {token: i for i, token in enumerate(first)}
        room = max(64, 2 * len(first))
        self._ids = np.empty(room, dtype=np.int64)
        self._ids[:len(first)] = first
        self._counts = np.zeros(room, dtype=np.float32)

    def fork(self) -> TokenCounts:
        """One of several that go on from here."""
        other = copy(self)
        other._at, other._ids, other._counts = self._at.copy(), self._ids.copy(), self._counts.copy()
        return other

    def add(self, token: int) -> None:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[at] = token
        self._counts[at] += 1

    def plus(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids and counts as they would be after `path`. Without a path these are views: not to be kept or changed."""
        n = len(self._at)
        if not path:
            return self._ids[:n], self._counts[:n]
        fresh: dict[int, int] = {}
        for token in path:
            if token not in self._at:
                fresh.setdefault(token, n + len(fresh))
        ids = np.concatenate((self._ids[:n], np.fromiter(fresh, dtype=np.int64, count=len(fresh))))
        counts = np.concatenate((self._counts[:n], np.zeros(len(fresh), dtype=np.float32)))
        for token in path:
            counts[fresh[token] if token in fresh else self._at[token]] += 1
        return ids, counts


_BASE = 0x2545F4914F6CDD1D9E3779B97F4A7C15
_PRIME = (1 << 127) - 1


class NgramFollowers:
    """Every n-gram of a text: which tokens have followed each run of n - 1 tokens.

    A run is known by one number, a polynomial of its tokens (127 bits: no two runs of a text share it), that is
    carried on from token to token. So what a token costs does not depend on n, which a client may choose.
    """

    __slots__ = ("_before", "_followers", "_leaving", "_run", "_text", "n")

    def __init__(self, n: int, tokens: Iterable[int] = ()) -> None:
        self.n = n
        self._text: list[int] = []
        self._run = 0
        """Of the last n - 1 tokens, or of as many as there are."""
        self._leaving = pow(_BASE, n - 1, _PRIME)
        self._followers: dict[int, set[int]] = {}
        self._before: dict[int, set[int]] = {}
        """Those of the prompt, where other samples go on from it too."""
        for token in tokens:
            self.add(token)

    def fork(self) -> NgramFollowers:
        """One of several that go on from here; nothing may be added to this one any more."""
        other = copy(self)
        other._text = self._text.copy()
        other._before, other._followers = self._followers, {}
        return other

    def add(self, token: int) -> None:
        text = self._text
        if len(text) >= self.n - 1:
            self._followers.setdefault(self._run, set()).add(token)
        text.append(token)
        self._run = self._rolled(self._run, token, text[-self.n] if len(text) >= self.n else None)

    def _rolled(self, run: int, token: int, left: int | None) -> int:
        run = run * _BASE + token + 1
        return (run if left is None else run - self._leaving * (left + 1)) % _PRIME

    def banned(self, path: Sequence[int] = ()) -> set[int]:
        """Tokens that would complete an n-gram the text followed by `path` already holds. Not to be changed."""
        text, size, run = self._text, len(self._text), self._run
        runs = [run]
        for at, token in enumerate(path, size + 1 - self.n):
            left = None if at < 0 else text[at] if at < size else path[at - size]
            run = self._rolled(run, token, left)
            runs.append(run)
        if size + len(path) < self.n - 1:
            return set()
        found = [known for followers in (self._before, self._followers) if (known := followers.get(run))]
        along = {token for at, token in enumerate(path) if size + at >= self.n - 1 and runs[at] == run}
        if along:
            found.append(along)
        return found[0] if len(found) == 1 else set().union(*found)


class BadWords:
    """Token sequences that must not appear; watches the end of the text for their beginnings."""

    __slots__ = ("_longer", "_tail", "_window", "single")

    def __init__(self, sequences: Iterable[Sequence[int]], tokens: Sequence[int] = ()) -> None:
        words = list(dict.fromkeys(tuple(sequence) for sequence in sequences))
        self.single: list[int] = [word[0] for word in words if len(word) == 1]
        """Always banned."""
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """(beginning, last token) of each, by the token that the beginning ends with: few have to be looked at."""
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self._window = max((len(word) - 1 for word in words), default=0)
        self._tail: tuple[int, ...] = tuple(tokens[-self._window:]) if self._window else ()

    def fork(self) -> BadWords:
        """One of several that go on from here."""
        return copy(self)

    def add(self, token: int) -> None:
        if self._window:
            self._tail = (*self._tail, token)[-self._window:]

    def banned(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens that would finish a bad word begun by the text followed by `path`."""
        end = path[-1] if path else self._tail[-1] if self._tail else None
        begun = () if end is None else self._longer.get(end, ())
        if not begun:
            return self.single
        text = (*self._tail, *path)
        return self.single + [last for start, last in begun
                              if len(start) <= len(text) and text[len(text) - len(start):] == start]


class Grammar(Protocol):
    """What may come next by a structure the text has to have. One object a sequence."""

    def mask(self, path: Sequence[int]) -> Any:
        """[V] booleans (torch or numpy), True where a token may follow the committed output and then `path`; None:
        any may. Draft tokens make up `path`, so it may be one the structure forbids: the answer must be what it would
        be had these tokens been committed."""

    def append(self, tokens: Sequence[int]) -> None:
        """Committed output tokens, in order. Must not raise."""

    def forced(self) -> Sequence[int]:
        """Tokens that will almost certainly follow the committed output, because the structure leaves no choice."""


class SampleState:
    """One sequence's sampling parameters, seed and running counts. The pipeline reads it; `append` on commit.

    Nothing is tracked that the parameters do not use, so a plain request costs one addition per token.
    """

    __slots__ = ("allowed", "bad_words", "bias_ids", "bias_values", "counts", "early_stops", "frequency",
                 "grammar", "is_greedy",
                 "min_tokens", "needs_processors", "ngrams", "output_len", "params", "presence", "repetition",
                 "seed", "temperature", "top_k", "tracks", "truncates", "vocab_size")

    def __init__(self, params: SamplingParams, prompt: Sequence[int], seed: int, vocab_size: int,
                 eos_ids: Iterable[int] = (), bad_words: Sequence[Sequence[int]] = ()) -> None:
        """`seed` is the sample's own (noise.sample_seed); `bad_words` come from tokenise_bad_words."""
        _check_ids(params, vocab_size)
        if params.bad_words and not bad_words:
            raise RequestError("bad_words came out as no tokens at all; remove them or spell them differently.",
                               "bad_words")
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.output_len = 0

        self.is_greedy = params.temperature < GREEDY_BELOW
        self.temperature = 1.0 if self.is_greedy else min(params.temperature, FLOAT_MAX)
        self.top_k = vocab_size if params.top_k == 0 else min(params.top_k, vocab_size)
        self.truncates = not self.is_greedy and (self.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0)

        self.repetition = min(max(params.repetition_penalty, _TINY), FLOAT_MAX)
        self.presence = _finite(params.presence_penalty)
        self.frequency = _finite(params.frequency_penalty)
        self.counts: TokenCounts | None = None
        if self.repetition != 1.0:
            self.counts = TokenCounts(prompt)
        elif self.presence or self.frequency:
            self.counts = TokenCounts()
        bias = {token: value for token, value in (params.logit_bias or {}).items() if value}
        self.bias_ids = np.fromiter(bias, dtype=np.int64, count=len(bias))
        # A bias of +inf becomes the largest float: it still beats everything, and a token at -inf stays there.
        with np.errstate(over="ignore"):
            self.bias_values = np.minimum(np.array(list(bias.values()), dtype=np.float64), FLOAT_MAX).astype(np.float32)
        self.bad_words = BadWords(bad_words, prompt) if bad_words else None
        size = params.no_repeat_ngram_size
        self.ngrams = NgramFollowers(size, prompt) if size else None
        self.allowed = None if params.allowed_token_ids is None else np.unique(
            np.array(params.allowed_token_ids, dtype=np.int64))
        self.early_stops = sorted({*(() if params.ignore_eos else eos_ids), *params.stop_token_ids})
        """What min_tokens keeps out until there are that many output tokens."""
        self.min_tokens = params.min_tokens if self.early_stops else 0

        self.grammar: Grammar | None = None
        """Set by whoever admits the request, where it asks for a structure."""
        self.tracks = self.counts is not None or self.bad_words is not None or self.ngrams is not None
        self.needs_processors = (self.tracks or bool(bias) or self.allowed is not None or self.min_tokens > 0)

    def fork(self, seed: int) -> SampleState:
        """That of a further sample, with a seed of its own: parameters and prompt are read once for all of them.
        Nothing may be appended to this one any more."""
        other = copy(self)
        other.seed = seed
        for name in ("counts", "bad_words", "ngrams"):
            keeper = getattr(self, name)
            if keeper is not None:
                setattr(other, name, keeper.fork())
        return other

    def append(self, tokens: Sequence[int]) -> None:
        """Committed output tokens, in order."""
        self.output_len += len(tokens)
        if self.grammar is not None:
            self.grammar.append(tokens)
        if not self.tracks:
            return
        for keeper in (self.counts, self.bad_words, self.ngrams):
            if keeper is not None:
                for token in tokens:
                    keeper.add(token)

    def banned(self, path: Sequence[int] = ()) -> list[int]:
        """Tokens that bad words and no-repeat n-grams keep out after `path`."""
        banned = list(self.bad_words.banned(path)) if self.bad_words is not None else []
        if self.ngrams is not None:
            banned.extend(self.ngrams.banned(path))
        return banned

    def too_early_to_stop(self, path: Sequence[int] = ()) -> bool:
        return self.output_len + len(path) < self.min_tokens

    def names(self, path: Sequence[int] = (), *, grammar: bool = False) -> tuple[str, ...]:
        """The processors that act on a row of this sequence, in the order they act."""
        p = self.params
        return tuple(name for name, on in (
            ("repetition_penalty", self.repetition != 1.0),
            ("presence_penalty", self.presence != 0.0),
            ("frequency_penalty", self.frequency != 0.0),
            ("logit_bias", len(self.bias_ids) > 0),
            ("bad_words", self.bad_words is not None),
            ("no_repeat_ngram_size", self.ngrams is not None),
            ("allowed_token_ids", self.allowed is not None),
            ("min_tokens", self.too_early_to_stop(path)),
            ("grammar", grammar),
            ("temperature", self.is_greedy or self.temperature != 1.0),
            ("top_k", self.truncates and self.top_k < self.vocab_size),
            ("top_p", self.truncates and p.top_p < 1.0),
            ("min_p", self.truncates and p.min_p > 0.0),
        ) if on)


def _finite(value: float) -> float:
    return math.copysign(min(abs(value), FLOAT_MAX), value)


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise RequestError(f"{name} names token {token}, but the model's ids end at {vocab_size - 1}.", name)
