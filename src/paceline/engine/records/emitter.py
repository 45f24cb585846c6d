"""Emitter: from a sequence's tokens to its text: detokenise, stop, hold back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PacelineError, RequestError, StepError
from paceline.request import Completion, SamplingParams, TokenLogprob
from paceline.sampling.stop import StopMatcher
from paceline.so_far import SampleSoFar

log = logging.getLogger("paceline.engine")


class TextStream(Protocol):
    """An incremental detokeniser: completed text per token, never half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """What ends a text beside its length: made once for all samples of a request."""

    token_ids: frozenset[int]
    strings: StopMatcher | None

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: frozenset[int]) -> StopCriteria:
        return cls(frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids),
                   StopMatcher(params.stop) if params.stop else None)


class Emitter:
    """What one sequence has produced, and whether it should go on."""

    __slots__ = (
        "_include_stop",
        "_interrupt",
        "_matcher",
        "_min_tokens",
        "_pieces",
        "_stop_ids",
        "_stop_when",
        "_stream",
        "_unread",
        "broken",
        "closes",
        "cumulative",
        "cut_short",
        "finish_reason",
        "index",
        "logprobs",
        "max_tokens",
        "score",
        "scored",
        "seed",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, params: SamplingParams, index: int, seed: int, max_tokens: int, stream: TextStream | None,
                 stops: StopCriteria) -> None:
        """Of the request's sample `index`."""
        self.index = index
        self.max_tokens = max_tokens
        """It ends with "length" after so many."""
        self.seed = seed
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.scored = params.logprobs is not None or params.trace or params.chosen_at_end
        """Whether anybody wants its tokens' log-probabilities."""
        self.cumulative: float | None = 0.0 if self.scored else None
        """Sum of the raw ones."""
        self.score: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.cut_short = False
        """One of the request's callables ended the text."""
        self.broken: StepError | None = None
        """Why the text ends before its tokens do: the detokenizer failed. No one else's request is to hear of it."""
        self._pieces: list[str] = []
        self._stream = stream
        self._unread: list[int] = []
        """Tokens whose text nobody has asked for yet."""
        self._matcher = None if stops.strings is None else stops.strings.fork()
        self._stop_ids = stops.token_ids
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._interrupt = params.interrupt
        self._stop_when = None if params.stop_when is None else params.stop_when()
        self.closes: Callable[[Tokens[int]], bool] | None = None
        """Says whether nothing but the end can follow the tokens so far; set where the request asks for a structure."""

    def push_all(self, tokens: list[int]) -> tuple[int, str | None]:
        """Take tokens until one ends the text: how many that were, and the reason. Where nothing depends on the text
        it is made when somebody asks for it: many sequences' tokens come at once, and the device waits meanwhile."""
        ids = self.token_ids
        if (self._matcher is None and self._interrupt is None and self._stop_when is None and self.closes is None
                and self.broken is None
                and len(ids) + len(tokens) < self.max_tokens and self._stop_ids.isdisjoint(tokens)):
            ids += tokens
            if self._stream is not None:
                self._unread += tokens
            return len(tokens), None
        for count, token in enumerate(tokens, 1):
            reason = self.push(token)
            if reason is not None:
                return count, reason
        return len(tokens), None

    def take_over(self, so_far: SampleSoFar) -> None:
        """Read what the sample has said elsewhere; in any thread."""
        if so_far.token_ids:
            self.push_all(list(so_far.token_ids))
        if so_far.finish_reason is not None:
            self.finish(so_far.finish_reason, so_far.stop_reason)
        _ = self.text  # made now and not while others wait

    def note(self, score: TokenLogprob) -> None:
        """The log-probability of a token that was or will be pushed; of one that is scored, each is noted in order."""
        self.cumulative = (self.cumulative or 0.0) + score.raw
        if self.logprobs is not None:
            self.logprobs.append(score)

    def _read(self) -> None:
        tokens, self._unread = self._unread, []
        for token in tokens:
            piece = self._decode(token)
            if piece:
                self._pieces.append(piece)

    def _decode(self, token: int | None) -> str:
        """What a token adds to the text; None: what its end does. Raises nothing: those who ask for a text have nothing
        to do with what breaks there."""
        if self._stream is None:
            return ""
        try:
            return self._stream.flush() if token is None else self._stream.push(token)
        except Exception as problem:
            log.error("the text of a request could not be made, which ends with an error", exc_info=problem)
            self._stream, said = None, problem.with_traceback(None)
        # Not in the handler: an error that remembers what was raised keeps the frames, and everybody in them.
        self.broken = StepError("The engine could not make a text of this request's tokens; try it again.", said)
        return ""

    def _shown(self, piece: str) -> tuple[str, str | None]:
        """What can be shown now that `piece` has come, and the stop string that it completes."""
        if self._matcher is None:
            return piece, None
        shown, stopped = self._matcher.push(piece)
        return shown + stopped if stopped is not None and self._include_stop else shown, stopped

    def push(self, token: int) -> str | None:
        """Take one token; the reason to stop after it, if there is one.

        The token that ends a text is part of `token_ids`; of the text only what comes before a stop string or a
        stop token is kept, unless the request asked for that too. Stop strings are looked for in the text from the
        min_tokens-th token on. Raises a PacelineError where what the request brought along fails on it.
        """
        ids = self.token_ids
        ids.append(token)
        count = len(ids)
        if self._unread:
            self._read()
        if token in self._stop_ids and count >= self._min_tokens:
            if self._include_stop:
                self._pieces.append(self._shown(self._decode(token))[0])
            return self.finish("stop", token)
        if self._stream is not None:
            piece = self._decode(token)
            if count >= self._min_tokens:
                piece, stopped = self._shown(piece)
                if stopped is not None:
                    self.finish_reason, self.stop_reason = "stop", stopped
            if piece:
                self._pieces.append(piece)
            if self.finish_reason is not None:
                return self.finish_reason
            if piece and self._stop_when is not None and self._enough(piece) and count >= self._min_tokens:
                self.cut_short = True
                return self.finish("stop")
        if self.broken is not None:
            raise self.broken
        if self.closes is not None and count >= self._min_tokens and self._closed():
            return self.finish("stop")
        if self._interrupt is not None and self._interrupted():
            self.cut_short = True
            return self.finish("interrupt")
        if count >= self.max_tokens:
            return self.finish("length")
        return None

    def finish(self, reason: str, stop: str | int | None = None) -> str:
        """End the text: what was held back can no longer become a stop string."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stop_reason = stop
            if self._unread:
                self._read()
            if self._stream is not None:
                tail, stopped = self._shown(self._decode(None))
                if self._matcher is not None and stopped is None:
                    tail += self._matcher.flush()
                if tail:
                    self._pieces.append(tail)
            if self.broken is not None:
                self.finish_reason, self.stop_reason = "error", None
        return self.finish_reason

    @property
    def text(self) -> str:
        if self._unread:
            self._read()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def completion(self) -> Completion:
        return Completion(self.index, self.text, list(self.token_ids), self.finish_reason, self.stop_reason,
                          None if self.logprobs is None else list(self.logprobs), self.seed, self.cumulative,
                          self.score)

    def _closed(self) -> bool:
        try:
            return self.closes(self.token_ids)  # type: ignore[misc]
        except PacelineError:
            raise
        except Exception as problem:
            raise RequestError(f"The grammar failed after {len(self.token_ids)} tokens ({type(problem).__name__}: "
                               f"{problem}); simplify it.") from problem

    def _enough(self, piece: str) -> bool:
        try:
            return bool(self._stop_when(piece))  # type: ignore[misc]
        except Exception as problem:
            raise RequestError(f"The stop_when callable raised {type(problem).__name__}: {problem}",
                               "stop_when") from problem

    def _interrupted(self) -> bool:
        try:
            return bool(self._interrupt(self.text, list(self.token_ids)))  # type: ignore[misc]
        except Exception as problem:
            raise RequestError(f"The interrupt callable raised {type(problem).__name__}: {problem}",
                               "interrupt") from problem
