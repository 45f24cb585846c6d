"""GrammarCompiler: structures are compiled beside the engine's loop, once each, within a time limit."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from paceline.errors import GrammarError
from paceline.grammar.library import INSTALL, Library
from paceline.grammar.states import CompiledGrammar
from paceline.grammar.structure import Structure
from paceline.grammar.vocabulary import Vocabulary

SECONDS = 10.0
"""A structure that takes longer than this is too complex."""
KEPT = 32
"""Compiled structures that are kept for requests to come."""
THREADS = 2
SPARE = 6
"""Threads that may be stuck in late structures, which nothing can stop, before others have to wait for them."""
WAITING = 60.0
"""A structure that no thread has taken up after this many seconds fails its requests."""


class Compilation:
    """A structure on its way: ask `result` now and then."""

    def __init__(self, structure: Structure, seconds: float, clock: Callable[[], float],
                 advance: Callable[[], None]) -> None:
        self.structure = structure
        self.future: Future[CompiledGrammar] = Future()
        self._seconds = seconds
        self._clock = clock
        self._advance = advance
        self._asked = clock()
        self._begun: float | None = None
        self.broke = False
        """Not the structure is to blame (there was no memory, say): whoever asks next has it tried again."""

    def begin(self) -> None:
        """The clock runs from when a thread takes it up: who waits for others is not too complex."""
        self._begun = self._clock()

    def join(self) -> None:
        """Somebody else wants it: what was given up before it began gets another chance."""
        if self._given_up:
            self._asked = self._clock()

    @property
    def late(self) -> bool:
        """Whether it keeps a thread for longer than it may."""
        return self._begun is not None and self._clock() - self._begun > self._seconds

    @property
    def over(self) -> bool:
        """Whether `result` knows."""
        if self._begun is None and not self.future.done():
            self._advance()
        return self.future.done() or self.late or self._given_up

    @property
    def _given_up(self) -> bool:
        return self._begun is None and self._clock() - self._asked > WAITING

    def result(self) -> CompiledGrammar:
        """Once `over`: the grammar, or the GrammarError that says why there is none."""
        if self.future.done():
            return self.future.result()
        field = self.structure.field
        if self.late:
            raise GrammarError(f"{field} is too complex: it was not compiled within {self._seconds:g} seconds. "
                               "Simplify it.", field)
        raise GrammarError(f"{field} could not be compiled: structures of other requests kept it waiting for "
                           f"{WAITING:g} seconds. Try again later.", field)


class GrammarCompiler:
    """Compiles for one engine. Equal structures are compiled once; what is wrong with one is remembered as well."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, seconds: float = SECONDS, kept: int = KEPT,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`vocabulary` is asked when the first structure comes."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._kept = kept
        self._clock = clock
        self._known: OrderedDict[Structure, Compilation] = OrderedDict()
        self._queue: deque[Compilation] = deque()
        self._running: set[Compilation] = set()
        self._turn = threading.Lock()
        """Held to look at the queue and at what runs."""
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._tokens = 0

    def compile(self, structure: Structure) -> Compilation:
        """Begin, or join what is under way or done."""
        known = self._known.get(structure)
        if known is None or known.broke:
            known = self._known[structure] = Compilation(structure, self._seconds, self._clock, self._advance)
            with self._turn:
                self._queue.append(known)
            self._advance()
        known.join()
        self._known.move_to_end(structure)
        for old in list(self._known.values()):
            if len(self._known) <= self._kept:
                break
            if old.future.done():
                del self._known[old.structure]
        return known

    def close(self) -> None:
        """No more structures; what is being compiled ends by itself."""
        with self._turn:
            for task in self._queue:
                task.future.cancel()
            self._queue.clear()

    def _advance(self) -> None:
        """Threads for those whose turn it is. Late ones do not count, within limits: they would block all others."""
        with self._turn:
            while self._queue:
                late = sum(task.late for task in self._running)
                if len(self._running) - min(late, SPARE) >= THREADS:
                    return
                task = self._queue.popleft()
                self._running.add(task)
                threading.Thread(target=self._run, args=(task,), name="paceline-grammar", daemon=True).start()

    def _run(self, task: Compilation) -> None:
        try:
            task.future.set_result(self._work(task))
        except GrammarError as problem:
            task.future.set_exception(problem)
        with self._turn:
            self._running.discard(task)
        self._advance()

    def _work(self, task: Compilation) -> CompiledGrammar:
        field = task.structure.field
        try:
            library = self._open(field)
            task.begin()
            return CompiledGrammar(task.structure, library.compile(task.structure), self._tokens)
        except GrammarError:
            raise
        except BaseException as problem:  # native code that panics raises no Exception
            task.broke = isinstance(problem, Exception)
            raise GrammarError(f"{field} could not be compiled ({type(problem).__name__}: {problem}); simplify it.",
                               field) from problem

    def _open(self, field: str) -> Library:
        with self._lock:
            if self._library is None:
                vocabulary = self._vocabulary()
                try:
                    self._library = Library(vocabulary)
                except ImportError:
                    raise GrammarError(f"{field} needs the package llguidance, which is not installed: {INSTALL}.",
                                       field) from None
                self._tokens = len(vocabulary)
            return self._library


def wait_for(compilations: Iterable[Compilation], seconds: float) -> None:
    """Until one of them is done, or the time is up."""
    wait([one.future for one in compilations], seconds, FIRST_COMPLETED)
