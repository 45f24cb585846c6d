"""GrammarCompiler: structures are compiled beside the engine's loop, once each, within a time limit."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

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


class Compilation:
    """A structure on its way: ask `result` now and then."""

    def __init__(self, structure: Structure, seconds: float, clock: Callable[[], float]) -> None:
        self.structure = structure
        self.future: Future[CompiledGrammar]
        self._seconds = seconds
        self._clock = clock
        self._begun: float | None = None

    def begin(self) -> None:
        """The clock runs from when a thread takes it up: who waits behind others is not too complex."""
        self._begun = self._clock()

    @property
    def over(self) -> bool:
        """Whether `result` knows."""
        late = self._begun is not None and self._clock() - self._begun > self._seconds
        return late or self.future.done()

    def result(self) -> CompiledGrammar:
        """Once `over`: the grammar, or the GrammarError that says why there is none."""
        if not self.future.done():
            field = self.structure.field
            raise GrammarError(f"{field} is too complex: it was not compiled within {self._seconds:g} seconds. "
                               "Simplify it.", field)
        return self.future.result()


class GrammarCompiler:
    """Compiles for one engine. Equal structures are compiled once; failures are remembered like successes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, seconds: float = SECONDS, kept: int = KEPT,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`vocabulary` is asked when the first structure comes."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._kept = kept
        self._clock = clock
        self._known: OrderedDict[Structure, Compilation] = OrderedDict()
        self._pool = ThreadPoolExecutor(THREADS, "paceline-grammar")
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._tokens = 0

    def compile(self, structure: Structure) -> Compilation:
        """Begin, or join what is under way or done."""
        known = self._known.get(structure)
        if known is None:
            known = self._known[structure] = Compilation(structure, self._seconds, self._clock)
            known.future = self._pool.submit(self._work, known)
        self._known.move_to_end(structure)
        for old in list(self._known.values()):
            if len(self._known) <= self._kept:
                break
            if old.future.done():
                del self._known[old.structure]
        return known

    def close(self) -> None:
        """No more structures; what is being compiled ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, task: Compilation) -> CompiledGrammar:
        field = task.structure.field
        try:
            library = self._open(field)
            task.begin()
            return CompiledGrammar(task.structure, library.compile(task.structure), self._tokens)
        except GrammarError:
            raise
        except BaseException as problem:  # native code that panics raises no Exception
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
