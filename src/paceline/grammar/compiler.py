"""GrammarCompiler: structures are compiled beside the engine's loop, once each, within a time limit, in fair turns."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
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
"""Structures that are begun at once."""
QUICK = 0.5
"""One that takes longer is slow: the next one is begun beside it, and quick ones do not wait for it."""
SLOW = 2 * THREADS
"""Structures under way at once, slow ones too; all but one of them may be the same tenant's."""
SPARE = 6
"""Threads that may be stuck in structures that are late, or that nobody wants any more: nothing can stop them."""
MOST_EACH = SPARE
"""Threads that one tenant's structures may keep, those that are stuck too: some are left for others."""
SHORT = 2048
"""Characters: a tenant's structures that are no longer go before its longer ones."""
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
        self.wanted: Counter[str] = Counter()
        """How many requests of which tenants wait for it."""
        self.owners: frozenset[str] = frozenset()
        """The tenants for whom it was begun."""
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
    def slow(self) -> bool:
        return self._begun is not None and self._clock() - self._begun > QUICK

    @property
    def stuck(self) -> bool:
        """Whether nobody waits for it any more, though it keeps a thread."""
        return self.late or not self.wanted

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
        field = self.structure.field
        if self.future.done():
            problem = self.future.exception()
            if problem is None:
                return self.future.result()
            # A new one for each who asks: what is raised gathers the frames that it passes, with all that lies in them,
            # and the one that is remembered would keep those of every request that ever asked.
            raise GrammarError(str(problem), field)
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
        self._queue: list[Compilation] = []
        self._running: set[Compilation] = set()
        self._turns: dict[str, int] = {}
        """How many structures had been begun when one was begun for each tenant that still waits for some."""
        self._begun = 0
        self._turn = threading.Lock()
        """Held to look at the queue and at what runs."""
        self._lock = threading.Lock()
        self._library: Library | None = None
        self._tokens = 0

    def compile(self, structure: Structure, tenant: str = "") -> Compilation:
        """Begin for a request of `tenant`, or join what is under way or done. Until then leave() takes it back."""
        known = self._known.get(structure)
        with self._turn:
            if known is None or known.broke:
                known = self._known[structure] = Compilation(structure, self._seconds, self._clock, self._advance)
                self._queue.append(known)
            known.wanted[tenant] += 1
        self._advance()
        known.join()
        self._known.move_to_end(structure)
        for old in list(self._known.values()):
            if len(self._known) <= self._kept:
                break
            if old.future.done():
                del self._known[old.structure]
        return known

    def leave(self, compilation: Compilation, tenant: str = "") -> None:
        """A request of `tenant` does not wait for it any longer. What nobody waits for is not begun; where it runs, it
        stands in nobody's way. Others get their turn when somebody next asks: the next may be taken back, too."""
        with self._turn:
            compilation.wanted -= Counter((tenant,))
            if not compilation.wanted and compilation in self._queue:
                self._queue.remove(compilation)
                compilation.future.cancel()
                self._known.pop(compilation.structure, None)

    def close(self) -> None:
        """No more structures; what is being compiled ends by itself."""
        with self._turn:
            for task in self._queue:
                task.future.cancel()
            self._queue.clear()

    def _advance(self) -> None:
        """Threads for those whose turn it is."""
        with self._turn:
            while (task := self._next()) is not None:
                thread = threading.Thread(target=self._run, args=(task,), name="paceline-grammar", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # none can be had just now: it keeps its place until somebody next asks
                    return
                self._queue.remove(task)
                self._running.add(task)
                self._begun += 1
                task.owners = frozenset(task.wanted)
                self._turns.update(dict.fromkeys(task.wanted, self._begun))

    def _next(self) -> Compilation | None:
        """Whose turn it is: a tenant with the fewest under way, the one that has waited longest. Those that are stuck
        do not count, within limits: they would block all others. None: nobody's."""
        under_way = [task for task in self._running if not task.stuck]
        stuck = len(self._running) - len(under_way)
        busy = len(under_way) + max(0, stuck - SPARE)
        if not self._queue or busy >= SLOW or busy - sum(task.slow for task in under_way) >= THREADS:
            return None
        load = Counter(tenant for task in under_way for tenant in task.wanted)
        waiting = {tenant for task in self._queue for tenant in task.wanted}
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in waiting or tenant in load}

        def place(task: Compilation) -> tuple[int, int, bool]:
            return (*min((load[tenant], self._turns.get(tenant, 0)) for tenant in task.wanted),
                    len(task.structure.text) > SHORT)

        threads = Counter(tenant for task in self._running for tenant in task.owners)
        ready = [task for task in self._queue if any(
            load[tenant] < SLOW - 1 and threads[tenant] < MOST_EACH for tenant in task.wanted)]
        return min(ready, key=place, default=None)  # of equals the first that came

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
