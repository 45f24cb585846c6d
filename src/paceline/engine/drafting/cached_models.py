"""Draft models over a cache: one that reads and overwrites the target's, one with a cache of its own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from paceline.cache.allocation import Allocation
from paceline.cache.manager import CacheManager
from paceline.cache.prefix import common_prefix
from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy
from paceline.engine.drafting.runner import DraftRunner
from paceline.engine.drafting.sampler import DraftSampler, Place
from paceline.engine.execute.graphs.memory import Use
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowOwner, Rows
from paceline.speculation.models import NO_SAMPLES, Ask, Samples
from paceline.speculation.sequence import DraftedSequence, root_of

if TYPE_CHECKING:
    from paceline.engine.drafting.device_sampler import DeviceDraftSampler

log = logging.getLogger("paceline.speculation")
FOLDED = 16
"""Tokens that a model is behind by and reads together with the first draft token."""


@dataclass(slots=True, eq=False)
class Held:
    """What a model's cache holds of a sequence: its first `final` tokens, then `chain`, which may not come true."""

    allocation: Allocation
    final: int = 0
    chain: list[int] = field(default_factory=list)
    adapter: Any = None
    """What the model reads it with, as Sequence.adapter."""


@dataclass(slots=True)
class ReadRows:
    """schedule.step.Rows that a model reads of a sequence."""

    seq: RowOwner
    start: int
    tokens: list[int]
    parents: list[int] | None
    logits_from: int


@dataclass(slots=True)
class Reading:
    """The rows that one ask makes a model read, and where it is sampled after them."""

    held: Held
    seq: Sequence
    chain: list[int]
    """All that follows `held.final` in one line: the sequence's newest tokens, then the draft as far as it is one."""
    begin: int
    """The first of `chain` to be read now."""
    tokens: list[int]
    parents: list[int] | None
    rows: list[int]
    """Row of each place."""
    places: list[Place]

    @property
    def start(self) -> int:
        return self.held.final + self.begin


def base_of(sequence: DraftedSequence) -> tuple[Sequence, list[int]]:
    """The engine's sequence, and the draft tokens it is to be continued from."""
    root, path = root_of(sequence)
    return cast(Sequence, root), path


class CachedModel(ABC):
    """speculation.models.DraftModel over a DraftRunner."""

    one_by_one = False
    lookup = None

    def __init__(self, runner: DraftRunner, cache: CacheManager, vocab_size: int, longest: int,
                 device: DeviceDraftSampler | None = None) -> None:
        """`longest`: positions the model can run. `device`: samples where it can, the host does elsewhere."""
        self._runner = runner
        self.device_sampler = device
        self._cache = cache
        self._vocab = vocab_size
        self._longest = min(longest, cache.max_blocks_per_seq * cache.block_size)
        self._sampler = DraftSampler(vocab_size)
        self._held: OrderedDict[Sequence, Held] = OrderedDict()
        """Least recently used first."""

    @abstractmethod
    def open(self, sequences: Seq[DraftedSequence], depths: Seq[int]) -> list[int]: ...

    @abstractmethod
    def _reserve(self, held: Held, start: int, end: int, busy: set[Sequence]) -> list[BlockCopy] | None:
        """Make positions writable, at the cost of sequences that are not busy; None: they are not to be had."""

    def release(self, sequence: DraftedSequence) -> None:
        self._held.pop(base_of(sequence)[0], None)

    def chains(self, sequences: Seq[DraftedSequence], least: Seq[float]) -> list[Samples] | None:
        return None

    def sample(self, asks: Seq[Ask]) -> list[list[Samples]]:
        busy = {base_of(ask.sequence)[0] for ask in asks}
        readings = [self._reading(ask, busy) for ask in asks]
        able = [reading for reading in readings if reading is not None]
        samples = iter(self._read(able)) if able else iter(())
        return [[NO_SAMPLES] * len(ask.at) if reading is None else [next(samples) for _ in reading.places]
                for ask, reading in zip(asks, readings)]

    def _depth(self, seq: Sequence, path: Seq[int]) -> int:
        """How deep a draft can be of use: its last token but one is read, and one more than it is emitted."""
        known = len(seq.tokens) + len(path)
        return max(0, min(seq.limit - known - 1, self._longest - known))

    def _reading(self, ask: Ask, busy: set[Sequence]) -> Reading | None:
        """What has to run for an ask, its slots reserved; None: there is no room for it."""
        seq, path = base_of(ask.sequence)
        held = self._held.get(seq)
        if held is None:
            return None
        lead = _lead(ask.parents)
        known = [*seq.tokens[held.final:], *path]
        chain = known + ask.tokens[:lead]
        # A node that is sampled after has to be read again even if it is in the cache already.
        first = min(len(known) + node if node < lead else len(chain) for node in ask.at)
        begin = min(common_prefix(held.chain, chain), first, len(chain) - 1)
        tokens = chain[begin:] + ask.tokens[lead:]
        end = held.final + begin + len(tokens)
        if end > self._longest:
            return None
        copies = self._reserve(held, held.final + begin, end, busy)
        if copies is None:
            return None
        self._runner.apply((), copies)
        offset = len(known) - begin
        """Row of the ask's node 0; below it lie the sequence's own tokens."""
        parents = None
        if len(ask.tokens) > lead:
            parents = [*range(-1, len(chain) - begin - 1), *(offset + parent for parent in ask.parents[lead:])]
        paths = draft_paths(ask)
        return Reading(held, seq, chain, begin, tokens, parents, [offset + node for node in ask.at],
                       [Place(seq, [*path, *paths[node + 1]], count) for node, count in zip(ask.at, ask.counts)])

    def _read(self, readings: Seq[Reading]) -> list[Samples]:
        groups: list[Rows] = []
        wanted: list[int] = []
        base = 0
        for reading in readings:
            first = min(reading.rows)
            groups.append(ReadRows(reading.held, reading.start, reading.tokens, reading.parents, first))
            wanted += [base + row - first for row in reading.rows]
            base += len(reading.tokens) - first
            # Whatever happens now, nothing beyond this is to be relied upon.
            reading.held.chain = reading.chain[:reading.begin]
        out = self._runner.run_rows(groups)
        for reading in readings:
            reading.held.chain = reading.chain
        places = [place for reading in readings for place in reading.places]
        sampler = self.device_sampler
        buffer = out.buffer
        if sampler is not None and buffer is not None and sampler.takes(buffer, places):
            found = sampler.memory.attempt(Use.DRAFT_SAMPLES, lambda: sampler.sample(buffer, places, wanted))
            if found is not None:
                return found
        logits = self._padded(out.logits)
        if wanted != list(range(base)):
            logits = logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
        return self._sampler.sample(logits, places)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, V]: V is the target's vocabulary, whatever padding each has."""
        missing = self._vocab - logits.shape[1]
        return logits[:, :self._vocab] if missing <= 0 else F.pad(logits, (0, missing), value=-torch.inf)


class TargetCacheModel(CachedModel):
    """A reduced form of the target on the target's cache.

    It reads the keys and values of the committed tokens and writes its own to the slots right after them. Those slots
    are written again by the step that verifies the draft (or that decodes plainly), before anybody else reads them.
    """

    def __init__(self, runner: DraftRunner, cache: CacheManager, scheduler: Scheduler, vocab_size: int,
                 longest: int, device: DeviceDraftSampler | None = None) -> None:
        super().__init__(runner, cache, vocab_size, longest, device)
        self._scheduler = scheduler

    def open(self, sequences: Seq[DraftedSequence], depths: Seq[int]) -> list[int]:
        # An accepted path may still wait to be moved into place, and we are about to read it; a block that we may write
        # to may still wait to be copied to the host.
        self._runner.apply(*self._scheduler.take_transfers())
        found: list[int] = []
        for sequence in sequences:
            seq, path = base_of(sequence)
            if not path or seq not in self._held:
                self._held[seq] = Held(seq.allocation, seq.computed, adapter=seq.adapter)
            found.append(self._depth(seq, path))
        return found

    def _reserve(self, held: Held, start: int, end: int, busy: set[Sequence]) -> list[BlockCopy] | None:
        return self._cache.reserve(held.allocation, start, end)


class OwnCacheModel(CachedModel):
    """Another model with a cache of its own. What it holds of a sequence outlives preemption of the sequence; where
    blocks or seats run out, the least recently drafted sequence loses its own."""

    def __init__(self, runner: DraftRunner, cache: CacheManager, vocab_size: int, longest: int, max_rows: int,
                 device: DeviceDraftSampler | None = None) -> None:
        """`max_rows`: how many rows it may read in one step to catch up, all sequences together."""
        super().__init__(runner, cache, vocab_size, longest, device)
        self._max_rows = max_rows
        self._own_vocab = runner.model.config.vocab_size

    def open(self, sequences: Seq[DraftedSequence], depths: Seq[int]) -> list[int]:
        busy = {base_of(sequence)[0] for sequence in sequences}
        found: list[int] = []
        behind: list[tuple[Sequence, Held]] = []
        for sequence in sequences:
            seq, path = base_of(sequence)
            depth = self._depth(seq, path)
            held = self._seat(seq, busy) if depth and self._readable(seq) else None
            found.append(0 if held is None else depth)
            if held is not None and len(seq.tokens) - held.final - len(held.chain) > FOLDED:
                behind.append((seq, held))
        late = self._catch_up(behind, busy)
        return [0 if base_of(sequence)[0] in late else depth for sequence, depth in zip(sequences, found)]

    def release(self, sequence: DraftedSequence) -> None:
        held = self._held.pop(base_of(sequence)[0], None)
        if held is not None:
            self._cache.close(held.allocation)

    def sample(self, asks: Seq[Ask]) -> list[list[Samples]]:
        for ask in asks:
            if ask.tokens and max(ask.tokens) >= self._own_vocab:
                ask.tokens, ask.parents = _below(ask, self._own_vocab)
        return super().sample(asks)

    def _readable(self, seq: Sequence) -> bool:
        """Whether the model knows every token of a sequence: its vocabulary may be padded less than the target's."""
        return self._own_vocab >= self._vocab or max(seq.tokens) < self._own_vocab

    def _seat(self, seq: Sequence, busy: set[Sequence]) -> Held | None:
        """What is held of a sequence, brought in line with its tokens."""
        held = self._held.get(seq)
        if held is None:
            if len(seq.tokens) >= self._cache.capacity():
                return None
            # Not the sequence's own: an adapter of the target changes nothing of what this model computes.
            scope = seq.request.scope
            while (allocation := self._cache.open(seq.tokens, salt=scope)) is None:
                if not self._evict(busy):
                    return None
            held = self._held[seq] = Held(allocation, allocation.cached)
        self._held.move_to_end(seq)
        newest = seq.tokens[held.final:-1]
        came_true = common_prefix(held.chain, newest)
        held.final += came_true
        held.chain = held.chain[came_true:] if came_true == len(newest) else []
        if came_true:
            self._cache.commit(held.allocation, seq.tokens, held.final)
        self._cache.rollback(held.allocation, held.final + len(held.chain))
        return held

    def _catch_up(self, behind: Seq[tuple[Sequence, Held]], busy: set[Sequence]) -> set[Sequence]:
        """Read what is missing, within the rows of one step. Returns who is not there yet."""
        left = self._max_rows
        groups: list[Rows] = []
        late: set[Sequence] = set()
        read: list[tuple[Sequence, Held, int]] = []
        for seq, held in behind:
            end = len(seq.tokens) - 1
            rows = min(left, end - held.final)
            copies = self._reserve(held, held.final, held.final + rows, busy) if rows else None
            if copies is None:
                late.add(seq)
                continue
            self._runner.apply((), copies)
            tokens = seq.tokens[held.final:held.final + rows]
            groups.append(ReadRows(held, held.final, tokens, None, rows))
            read.append((seq, held, rows))
            left -= rows
            held.chain = []
            if held.final + rows < end:
                late.add(seq)
        if groups:
            self._runner.run_rows(groups)
        for seq, held, rows in read:
            held.final += rows
            self._cache.commit(held.allocation, seq.tokens, held.final)
        return late

    def _reserve(self, held: Held, start: int, end: int, busy: set[Sequence]) -> list[BlockCopy] | None:
        while (copies := self._cache.reserve(held.allocation, start, end)) is None:
            if not self._evict(busy):
                return None
        return copies

    def _evict(self, busy: set[Sequence]) -> bool:
        for seq in self._held:
            if seq not in busy:
                self.release(seq)
                return True
        return False

    def check(self) -> None:
        """Raise if the bookkeeping of the cache contradicts itself (tests, idle engines)."""
        allocations: list[Allocation] = [held.allocation for held in self._held.values()]
        self._cache.check(allocations)

    @property
    def storage(self) -> KVStorage:
        return self._runner.storage


def _lead(parents: Seq[int]) -> int:
    """How many nodes from the root on form a chain with nothing beside it: all others hang below its last."""
    chain = next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
    return min([chain, *(parent + 1 for parent in parents[chain:])])


def draft_paths(ask: Ask) -> list[list[int]]:
    """Draft tokens down to each node, the root first: paths[node + 1]."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(ask.tokens, ask.parents):
        paths.append([*paths[parent + 1], token])
    return paths


def _below(ask: Ask, vocab_size: int) -> tuple[list[int], list[int]]:
    """An ask's nodes with ids that the model does not know replaced: what is sampled below them is of no use."""
    return [min(token, vocab_size - 1) for token in ask.tokens], ask.parents
