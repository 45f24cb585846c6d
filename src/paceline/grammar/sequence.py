"""SequenceGrammar: the structure of one sample, as the pipeline asks for it: a mask after any draft path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import GrammarError
from paceline.grammar.library import reason
from paceline.grammar.states import CompiledGrammar, State

Bits = tuple[NDArray[np.uint8], float]


class SequenceGrammar:
    """A pure function of the committed output and a path; what it keeps only saves work.

    A text that has left the structure (on_empty_support="unmasked" lets it) is free from there on: no mask. A structure
    that turns out too complex on the way raises a GrammarError where that is asked for, and only there: the text may
    yet go another way.
    """

    def __init__(self, compiled: CompiledGrammar, vocab_size: int, ends: Iterable[int]) -> None:
        """`ends`: tokens that end the text, allowed where the structure may end. Masks have `vocab_size` entries."""
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._output: list[int] = []
        self._here: State | None = compiled.start()
        self._walked = 0
        """`_here` is the state after so many output tokens."""
        self._matcher: Any = None
        """Made when a state is needed that nobody has visited."""
        self._consumed: list[int] = []
        """What the matcher has consumed: output, and perhaps a draft that came to nothing."""
        self._sure = 0
        """So many of those are output."""
        self._making: tuple[State, Future[Bits]] | None = None
        """A state whose mask is being made in another thread, which has the matcher meanwhile."""
        self._failed: tuple[State, GrammarError] | None = None
        """A state for which there was none to be made."""

    @property
    def slow(self) -> bool:
        """Whether masks of this structure take long."""
        return self._compiled.slow

    @property
    def making(self) -> Future[Bits] | None:
        return None if self._making is None else self._making[1]

    def ready(self, submit: Callable[[Callable[[], Bits]], Future[Bits]]) -> bool:
        """Whether the mask after the output is there, or will not take long. Else it is being made, by `submit`."""
        if self._making is not None:
            if not self._making[1].done():
                return False
            self._collect()
        if not self.slow:
            return True
        try:
            state = self._after(())
            if state is None or state.allowed is not None or (self._failed is not None and self._failed[0] is state):
                return True
            self._move(self._output)
        except Exception:  # whoever asks for the mask will meet it: that ends one request, and here it would end all
            return True
        compiled, matcher = self._compiled, self._matcher
        self._making = state, submit(lambda: compiled.bits(matcher))
        return False

    def _collect(self) -> None:
        """Take what the other thread has made, or wait for it."""
        if self._making is None:
            return
        (state, future), self._making = self._making, None
        try:
            bits, seconds = future.result()
            self._check()
        except GrammarError as problem:
            self._failed = state, problem
            return
        except BaseException as problem:  # native code that panics raises no Exception
            self._matcher = None  # nobody knows what it has been through
            field = self._compiled.structure.field
            self._failed = state, GrammarError(f"{field} failed after {len(self._output)} output tokens "
                                               f"({type(problem).__name__}: {problem}); simplify it.", field)
            return
        self._compiled.keep(state, bits, seconds)

    def _mask_of(self, state: State, text: list[int]) -> NDArray[np.uint8]:
        """What `state` allows, which `text` led to."""
        if state.allowed is None:
            self._collect()
        if self._failed is not None and self._failed[0] is state:
            raise self._failed[1]
        if state.allowed is None:
            self._move(text)
            bits, seconds = self._compiled.bits(self._matcher)
            self._check()
            self._compiled.keep(state, bits, seconds)
        assert state.allowed is not None
        return state.allowed

    def mask(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """[V] booleans: what may follow the output and then `path`; None: anything."""
        state = self._after(path)
        if state is None:
            return None
        allowed = self._mask_of(state, [*self._output, *path])
        mask = np.unpackbits(allowed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if state.may_end:
            mask[self._ends] = True
        return mask

    def append(self, tokens: Sequence[int]) -> None:
        """Takes note, no more: what can fail does so when it is asked for."""
        self._output += tokens

    def resume(self, said: Sequence[int]) -> None:
        """As append(), at the beginning, of a text that has kept to the structure elsewhere: goes to its end at once
        and not by the mask after each of its tokens, for which everybody would wait."""
        self.append(said)
        if not said:
            return
        try:
            self._move(self._output)
            here = self._compiled.read(self._matcher)
            self._check()
        except Exception:  # whoever asks for the mask will meet it
            self._matcher = None
            return
        self._here, self._walked = here, len(self._output)

    def closed(self, output: Sequence[int]) -> bool:
        """Whether nothing but the end can follow `output`, the committed tokens and perhaps some more."""
        state = self._after(output[len(self._output):])
        return state is not None and state.closed

    def forced(self) -> tuple[int, ...]:
        """The tokens that spell the only possible continuation; empty: there is a choice. Where bytes are forced the
        mask leaves only the token that the tokenizer would write them in, so nothing else can come."""
        state = self._after(())
        if state is None or state.closed:
            return ()
        if state.forced is None:
            self._move(self._output)
            tokens = tuple(self._matcher.compute_ff_tokens())
            self._check()
            state.forced = tokens
        return state.forced

    def _after(self, path: Sequence[int]) -> State | None:
        """The state after the output and `path`; None: the structure does not allow it."""
        while self._walked < len(self._output) and self._here is not None:
            self._here = self._next(self._here, self._output, self._walked)
            self._walked += 1
        state = self._here
        if path and state is not None:
            text = [*self._output, *path]
            for at in range(len(self._output), len(text)):
                state = self._next(state, text, at)
                if state is None:
                    return None
        return state

    def _next(self, state: State, text: list[int], at: int) -> State | None:
        """What follows `state`, which text[:at] led to, by text[at]."""
        token = text[at]
        found = state.next.get(token)
        if found is None:
            self._mask_of(state, text[:at])
        if found is None and state.allows(token):
            self._move(text[:at + 1])
            found = self._compiled.read(self._matcher)
            self._check()
            state.next[token] = found
        return found

    def _move(self, text: list[int]) -> None:
        """Bring the matcher to the end of `text` by the shortest way."""
        self._collect()
        if self._matcher is None:
            self._matcher, self._consumed, self._sure = self._compiled.matcher(), [], 0
        consumed = self._consumed
        same, most = self._sure, min(len(consumed), len(text))
        while same < most and consumed[same] == text[same]:
            same += 1
        if same < len(consumed):
            self._matcher.rollback(len(consumed) - same)
            if self._matcher.is_error():  # no way back (a grammar with "stop" or "max_tokens"): from the beginning
                self._matcher, same = self._compiled.matcher(), 0
            del consumed[same:]
        if same < len(text):
            self._matcher.consume_tokens(text[same:])
            consumed += text[same:]
        self._sure = min(len(self._output), len(text))
        self._check()

    def _check(self) -> None:
        """A matcher that gave up never recovers; whoever comes this way again gets a new one."""
        problem = reason(self._matcher)
        if problem is not None:
            self._matcher = None
            field = self._compiled.structure.field
            raise GrammarError(f"{field} became too complex after {len(self._output)} output tokens: {problem}. "
                               "Simplify it.", field)
