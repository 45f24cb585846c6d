"""Structures: the grammars of an engine's requests, and the requests that wait until theirs is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from functools import partial

from paceline.engine.records.record import Record
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.errors import GrammarError, PacelineError
from paceline.fair_workers import FairWorkers
from paceline.grammar.compiler import Compilation, GrammarCompiler, wait_for
from paceline.grammar.sequence import SequenceGrammar
from paceline.grammar.states import CompiledGrammar
from paceline.grammar.structure import Structure, structure_of
from paceline.grammar.vocabulary import Vocabulary
from paceline.models.tokenizer import Tokenizer
from paceline.request import Request, SamplingParams

PATIENCE = 0.02
"""Seconds that a loop with nothing else to do waits for a grammar, or a mask, before it looks after other things."""

WARM_UP = 10.0
"""Seconds that reading the vocabulary may take at the start."""


class Structures:
    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int],
                 clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_ids
        self._clock = clock
        self._compiler: GrammarCompiler | None = None
        self._workers = FairWorkers("paceline-masks")
        """Make masks that take long."""
        self._waiting: dict[str, tuple[Compilation, str]] = {}
        """By request: what it waits for, and on whose account."""

    @property
    def compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._vocabulary, clock=self._clock)
        return self._compiler

    def warm_up(self) -> None:
        """Have the vocabulary read, and the first grammar compiled."""
        with suppress(PacelineError):
            structure = self.wanted(SamplingParams(regex="a"))
            if structure is not None:
                compilation = self.compiler.compile(structure)
                wait_for([compilation], WARM_UP)
                self.compiler.leave(compilation)

    def wanted(self, params: SamplingParams) -> Structure | None:
        """What `params` ask for; None: nothing. Raises a GrammarError where it can be told at once that it is none."""
        structure = structure_of(params)
        if structure is None:
            return None
        if self._tokenizer is None or self._tokenizer.table.kind == "opaque":
            raise GrammarError(
                f"{structure.field} needs to know the text of each token, and this model came without a tokenizer or "
                "with one whose tokens have no text of their own; leave it out.", structure.field)
        return structure

    def hold(self, request: Request, structure: Structure) -> None:
        """A request waits until its structure is compiled."""
        tenant = request.tenant.name
        self._waiting[request.id] = (self.compiler.compile(structure, tenant), tenant)

    def release(self, records: Mapping[str, Record], scheduler: Scheduler) -> list[str]:
        """Requests whose grammar is ready join the queue. Those whose grammar failed have their error set and are
        returned, to be ended. Waits a little where nobody has anything else to do."""
        failed: list[str] = []
        if self._compiler is not None:
            self._rest(scheduler)
        if not self._waiting:
            return failed
        if scheduler.only_held and not any(one.over for one, _ in self._waiting.values()):
            wait_for([one for one, _ in self._waiting.values()], PATIENCE)
        for request_id in [name for name, (one, _) in self._waiting.items() if one.over]:
            record, compilation = records[request_id], self._waiting[request_id][0]
            try:
                compiled = compilation.result()
            except GrammarError as problem:
                record.error = problem.with_traceback(None)  # which holds this frame, and so the record
                failed.append(request_id)
                continue
            finally:
                self.forget(request_id)  # not before: what nobody waits for any more is cancelled
            for seq in scheduler.sequences(request_id):
                self.attach(seq, compiled)
            scheduler.release(request_id)
        return failed

    def prepare(self, scheduler: Scheduler) -> None:
        """Before a step is planned: sequences whose next mask takes long have it made beside the loop, and sit out
        until it is there. Nobody else waits for it."""
        if self._compiler is None:
            return
        for seq in scheduler.running:
            grammar = seq.state.grammar
            if not isinstance(grammar, SequenceGrammar):
                continue
            seq.slow_masks = grammar.slow
            if grammar.slow:
                seq.wait_for_commit = True
                seq.draft = None
            if not seq.in_flight:
                seq.masking = not grammar.ready(partial(self._workers.submit, seq.request.tenant.name))

    def _rest(self, scheduler: Scheduler) -> None:
        """Wait a little for masks, where nobody has anything else to do."""
        running = scheduler.running
        if not running or scheduler.steps_in_flight or not all(seq.masking for seq in running):
            return
        making = [seq.state.grammar.making for seq in running if isinstance(seq.state.grammar, SequenceGrammar)]
        wait([one for one in making if one is not None], PATIENCE, FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        """It waits no longer: nobody compiles for it alone."""
        compilation, tenant = self._waiting.pop(request_id, (None, ""))
        if compilation is not None:
            self.compiler.leave(compilation, tenant)

    def attach(self, seq: Sequence, compiled: CompiledGrammar) -> None:
        """From now on the structure holds for `seq`."""
        params = seq.request.params
        special = self._tokenizer.special_ids if self._tokenizer is not None else frozenset()
        ends = set(special.intersection(params.stop_token_ids))
        if not params.ignore_eos:
            ends |= self._eos
        grammar = SequenceGrammar(compiled, self._vocab_size, ends)
        grammar.append(seq.emitter.token_ids)
        seq.state.grammar = grammar
        seq.emitter.closes = grammar.closed

    def _vocabulary(self) -> Vocabulary:
        tokenizer = self._tokenizer
        assert tokenizer is not None  # begin() refused
        size = min(tokenizer.vocab_size, self._vocab_size)
        ends = self._eos | tokenizer.special_ids
        return Vocabulary([None if token in ends else tokenizer.token_bytes(token) for token in range(size)],
                          tokenizer.encode_inside)
