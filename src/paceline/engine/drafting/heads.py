"""HeadModel: a trained head over what every step of the target stores for it, as a model that drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage
from paceline.engine.drafting.cached_models import base_of, draft_paths
from paceline.engine.drafting.context_tokens import ContextTokens
from paceline.engine.drafting.lines import Line, blocks_layout, lines_layout
from paceline.engine.drafting.sampler import DraftSampler, Place
from paceline.engine.execute.executor import bring_into_place
from paceline.engine.execute.target_heads import GROUP, TargetHeads
from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence
from paceline.kernels.device.lookup import HeadDraft
from paceline.kernels.layout import Layout
from paceline.models.heads.further import Further
from paceline.models.heads.interface import GREEDY, Best, Draw, Head, Opened, Pass, Round
from paceline.speculation.guard import reason
from paceline.speculation.models import NO_SAMPLES, Ask, Samples
from paceline.speculation.sequence import DraftedSequence

SAME_FOR_ALL = ("medusa", "dflash")
"""Kinds whose logits hang on how deep a token lies and not on those drafted above it: one line serves a whole tree."""
NOWHERE = -1


@dataclass(slots=True)
class Member:
    """A sequence that takes part in a round."""

    seq: Sequence
    path: list[int]
    """Draft tokens that it is to be continued from."""
    depth: int
    """How deep its draft may be, `path` not counted."""
    rows: int = 0
    """Of the first pass."""
    end: int = 0
    """The first position that is not reserved for it."""
    written: int = 0
    """The first position that no line of its tree writes to."""

    @property
    def anchor(self) -> int:
        """Position of its newest token."""
        return len(self.seq.tokens) - 1


@dataclass(slots=True)
class OpenRound:
    """Sequences that are drafted together. All of them take every step of the round, whoever still asks."""

    members: list[Member]
    round: Round | None
    """None: all its steps are taken."""
    left: int
    """Steps that can still be taken."""
    previous: list[int] = field(default_factory=list)
    """The token that each line takes its next step from."""
    taken: int = 0
    lines: list[Line] | None = None
    """None: one of each member, whose tokens lie at their positions."""
    line_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """By member and node: the line that the last step went on from it in."""
    further: Further | None = None
    """Of the members: what they are drafted from beside the draft vocabulary."""

    def further_ids(self, rows: Seq[int]) -> torch.Tensor | None:
        """[rows, Further.width]: of lines of the last step."""
        if self.further is None:
            return None
        members = [row if self.lines is None else self.lines[row].member for row in rows]
        return torch.from_numpy(self.further.ids[members])


class Asked(NamedTuple):
    """A node to go on from, -1 being the newest token of its sequence."""

    member: int
    node: int
    parent: int
    place: Place


class HeadModel:
    """speculation.models.DraftModel. A round is opened for all sequences at once and then goes on token by token, so it
    is asked for what follows its own last tokens alone: one of each sequence, or several, which then part.

    What it writes lies in the slots from each sequence's newest token on, which the step that verifies the draft (or
    decodes plainly) writes again before anybody reads them.
    """

    one_by_one = True

    def __init__(self, name: str, heads: TargetHeads, storage: KVStorage, cache: CacheManager, scheduler: Scheduler,
                 vocab_size: int, longest: int, device: torch.device) -> None:
        """`longest`: positions that can be run."""
        self.name = name
        self.head: Head = heads.heads[name]
        self.lookup = HeadDraft(heads.number(name))
        self._same_for_all = self.head.config.kind in SAME_FOR_ALL
        self._heads = heads
        self._planes = heads.planes(name)
        self._storage = storage
        self._cache = cache
        self._scheduler = scheduler
        self._device = device
        self._vocab = vocab_size
        longest = min(longest, self.head.config.max_position_embeddings) if self.head.config.attends else longest
        self._positions = cache.max_blocks_per_seq * cache.block_size
        """That a sequence can hold."""
        self._longest = min(longest, self._positions)
        self._window = self.head.config.sees(storage.groups[GROUP].window)
        self._sampler = DraftSampler(vocab_size)
        self._place: dict[DraftedSequence, tuple[OpenRound, int]] = {}
        self._context = ContextTokens(self.head) if self.head.drafts_further else None

    @torch.inference_mode()
    def open(self, sequences: Seq[DraftedSequence], depths: Seq[int]) -> list[int]:
        self._heads.settle()
        lost = self._heads.lost.get(self.name)
        if lost is not None:
            raise RuntimeError(f"the trained head {self.name} has failed before: {reason(lost)}")
        # An accepted path may still wait to be moved into place, and we are about to read it; a block that we may write
        # to may still wait to be copied to the host.
        bring_into_place(self._storage, *self._scheduler.take_transfers())
        self._place = {}
        found: list[int] = []
        together: dict[tuple[int, int], list[tuple[DraftedSequence, Member]]] = {}
        for sequence, wanted in zip(sequences, depths):
            seq, path = base_of(sequence)
            member = Member(seq, path, self._depth(seq, path, wanted))
            able = member.depth > 0 and self._reserve(member)
            found.append(member.depth if able else 0)
            if able:
                together.setdefault((member.rows, len(path)), []).append((sequence, member))
        for company in together.values():
            opened = self._open([member for _, member in company])
            for index, (sequence, _) in enumerate(company):
                self._place[sequence] = opened, index
        return found

    def sample(self, asks: Seq[Ask]) -> list[list[Samples]]:
        found: dict[int, list[Samples]] = {}
        by_round: dict[int, list[tuple[int, Ask]]] = {}
        for number, ask in enumerate(asks):
            opened, _ = self._place[ask.sequence]
            by_round.setdefault(id(opened), []).append((number, ask))
        for company in by_round.values():
            opened = self._place[company[0][1].sequence][0]
            samples = self._step(opened, [ask for _, ask in company])
            for (number, _), own in zip(company, samples):
                found[number] = own
        return [found[number] for number in range(len(asks))]

    def chains(self, sequences: Seq[DraftedSequence], least: Seq[float]) -> list[Samples] | None:
        places = [self._place.get(sequence) for sequence in sequences]
        opened = next((place[0] for place in places if place is not None), None)
        if opened is None or opened.round is None or len(opened.members) < sum(map(bool, places)):
            return None
        if any(member.path or not (_is_plain(member.seq) or _is_drawn(member.seq)) for member in opened.members):
            return None
        limits = [one for place, one in zip(places, least) if place is not None]
        steps = opened.round.chain(opened.previous, limits, [_draw_of(member.seq) for member in opened.members])
        if steps is None:
            return None
        opened.round = None
        return [NO_SAMPLES if place is None else _cut(steps, place[1], one) for place, one in zip(places, least)]

    def release(self, sequence: DraftedSequence) -> None:
        self._place.pop(sequence, None)
        if self._context is not None:
            self._context.release(base_of(sequence)[0])

    def _depth(self, seq: Sequence, path: Seq[int], wanted: int) -> int:
        """How deep a draft can be of use: one token more than it is emitted."""
        known = len(seq.tokens) + len(path)
        depth = min(wanted, seq.limit - known - 1, self._longest - known)
        most = self.head.config.depth
        return depth if most is None else min(depth, most - len(path))

    def _reserve(self, member: Member) -> bool:
        """Slots for the passes of a round. False: there is no room for them."""
        passes = self.head.passes(len(member.path) + member.depth)
        if not passes:
            return True
        member.end = min(self._longest, member.anchor + max(one.first + one.rows for one in passes))
        member.rows = min(passes[0].rows, member.end - member.anchor - passes[0].first)
        copies = self._cache.reserve(member.seq.allocation, member.anchor, member.end)
        if copies is None:
            return False
        bring_into_place(self._storage, (), copies)
        return True

    def _open(self, members: list[Member]) -> OpenRound:
        depth = max(len(member.path) + member.depth for member in members)
        before, anchors = [], []
        table = self._cache.tables[GROUP]
        size = self._cache.block_size
        for member in members:
            anchors.append(member.seq.tokens[-1])
            seat, last = member.seq.allocation.seat, member.anchor - 1
            before.append(int(table[seat, last // size]) * size + last % size if last >= 0 else 0)
        passes = [self._layout(members, one, min(one.rows, members[0].rows) if number == 0 else one.rows)
                  for number, one in enumerate(self.head.passes(depth))]
        further = None if self._context is None else self._context.of([member.seq for member in members])
        opened = Opened(self._numbers(anchors), self._numbers(before), passes, depth, further)
        round = self.head.open(opened, self._planes, self._heads.kernels)
        return OpenRound(members, round, depth, anchors, further=further)

    def _numbers(self, given: Seq[int]) -> torch.Tensor:
        return torch.from_numpy(np.array(given, dtype=np.int64)).to(self._device)  # sooner than torch.tensor

    def _layout(self, members: Seq[Member], one: Pass, rows: int) -> Layout:
        """A pass over `rows` rows of each sequence."""
        # Who has no position left for a pass that others need writes over its last one, and is not asked any more.
        starts = [min(member.anchor + one.first, member.end - rows) for member in members]
        layout = blocks_layout(starts, rows, [member.seq for member in members], self._cache.tables[GROUP],
                               self._cache.block_size, self._window)
        layout.mutual = one.mutual
        return self._on_device(layout)

    def _on_device(self, layout: Layout) -> Layout:
        if self._device.type != "cpu":
            layout.positions = layout.positions.to(self._device, non_blocking=True)
            for view in layout.views:
                view.tables = view.tables.to(self._device, non_blocking=True)
                view.slots = view.slots.to(self._device, non_blocking=True)
        return layout

    @torch.inference_mode()
    def _step(self, opened: OpenRound, asks: Seq[Ask]) -> list[list[Samples]]:
        """What follows the nodes of each ask, which all lie one deeper than those of the last time."""
        asked: list[Asked] = []
        for ask in asks:
            index = self._place[ask.sequence][1]
            member, paths = opened.members[index], draft_paths(ask)
            asked += [Asked(index, node, ask.parents[node] if node >= 0 else NOWHERE,
                            Place(member.seq, [*member.path, *paths[node + 1]], count))
                      for node, count in zip(ask.at, ask.counts)]
        depth = len(asked[0].place.path)
        if any(len(one.place.path) != depth for one in asked) or depth < opened.taken:
            raise ValueError("a head is asked level by level")
        rows: list[int] = []
        while opened.taken <= depth and opened.round is not None:
            # Tokens that a sequence is continued from come first, and there is one line of them.
            rows = self._forked(opened, asked) if opened.taken == depth else [one.member for one in asked]
            if max(rows) == NOWHERE:
                break
            if opened.taken:
                # Those who are not asked about any more go on from whatever they had.
                for row, one in zip(rows, asked):
                    if row != NOWHERE:
                        opened.previous[row] = one.place.path[opened.taken - 1]
            logits, confidence = opened.round.logits(self._numbers(opened.previous))
            opened.taken += 1
            opened.left -= 1
            if not opened.left:
                opened.round = None
        if opened.taken != depth + 1:
            return [[NO_SAMPLES] * len(ask.at) for ask in asks]
        able = [(row, one.place) for row, one in zip(rows, asked) if row != NOWHERE]
        lines = [row for row, _ in able]
        found = iter(self._sampled(logits, confidence, opened.further_ids(lines), lines, [place for _, place in able]))
        samples = iter([NO_SAMPLES if row == NOWHERE else next(found) for row in rows])
        return [[next(samples) for _ in ask.at] for ask in asks]

    def _forked(self, opened: OpenRound, asked: Seq[Asked]) -> list[int]:
        """The line that each goes on in at the step to come, the round forked where lines part; NOWHERE: there is no
        room for it."""
        members = [one.member for one in asked]
        rows = members
        if not self._same_for_all and (opened.lines is not None or len(set(members)) < len(members)):
            rows = self._fork(opened, asked)
        opened.line_of = {(one.member, one.node): row for one, row in zip(asked, rows)}
        return rows

    def _fork(self, opened: OpenRound, asked: Seq[Asked]) -> list[int]:
        old = opened.lines
        if old is None:
            old = [Line(index, tuple(range(member.anchor, member.anchor + opened.taken)))
                   for index, member in enumerate(opened.members)]
            for member in opened.members:
                member.written = member.anchor + opened.taken
        writes = len(self.head.passes(opened.taken + 1)) > 1
        lines: list[Line] = []
        sources: list[int] = []
        rows: list[int] = []
        for one in asked:
            source = opened.line_of[one.member, one.parent]
            member = opened.members[one.member]
            if writes and not self._place_left(member):
                rows.append(NOWHERE)
                continue
            rows.append(len(lines))
            lines.append(Line(one.member, (*old[source].places, member.written)))
            sources.append(source)
            member.written += 1
        opened.lines, opened.previous = lines, [0] * len(lines)
        if lines and opened.round is not None:
            layout = None
            if writes:
                layout = self._on_device(lines_layout(lines, [member.seq for member in opened.members],
                                                      self._cache.tables[GROUP], self._cache.block_size, self._window))
            opened.round.fork(torch.tensor(sources, dtype=torch.int64, device=self._device), layout)
        return rows

    def _place_left(self, member: Member) -> bool:
        """Whether a tree can write one token more, in a block more of the sequence where it needs one."""
        if member.written < member.end:
            return True
        size = self._cache.block_size
        end = min(self._positions, (member.written // size + 1) * size)
        copies = self._cache.reserve(member.seq.allocation, member.anchor, end) if end > member.written else None
        if copies is None:
            return False
        bring_into_place(self._storage, (), copies)
        member.end = end
        return True

    def _sampled(self, logits: torch.Tensor, confidence: torch.Tensor | None, further: torch.Tensor | None,
                 rows: list[int], places: Seq[Place]) -> list[Samples]:
        """`further`: OpenRound.further_ids of the rows."""
        if rows != list(range(logits.shape[0])):
            index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
            logits = logits[index]
            confidence = None if confidence is None else confidence[index]
        if all(place.count == 1 and _is_plain(place.seq) for place in places):
            return self._best(logits, confidence, further)
        ids = self.head.target_ids
        if ids is not None:
            own, others = logits[:, :len(ids)], logits[:, len(ids):]
            logits = logits.new_full((logits.shape[0], self._vocab), -torch.inf).index_copy_(1, ids, own)
            if further is not None:  # what a line has fewer is -inf, and takes nothing from the token it is put to
                logits.scatter_reduce_(1, further, others, "amax")
        return self._sampler.sample(logits, places, None if confidence is None else confidence.clamp(max=1.0).tolist())

    def _best(self, logits: torch.Tensor, confidence: torch.Tensor | None,
              further: torch.Tensor | None) -> list[Samples]:
        """What greedy requests without controls get, found among the draft's own ids."""
        # numpy finds it many times sooner than torch does in so few rows.
        best = torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)
        if confidence is None:
            confidence = torch.exp(logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1))
        confidence = confidence.clamp(max=1.0)
        ids = self.head.target_ids
        tokens = best if ids is None else ids.index_select(0, best.clamp(max=len(ids) - 1))
        if ids is not None and further is not None:
            place = best[:, None] - len(ids)
            tokens = tokens.where(place[:, 0] < 0, further.gather(1, place.clamp(min=0))[:, 0])
        return [Samples([token], confidences=[chance])
                for token, chance in zip(tokens.tolist(), confidence.tolist())]


def _is_plain(seq: Sequence) -> bool:
    """Whether what a sequence samples is the likeliest token, and nothing else."""
    return seq.state.is_greedy and not seq.state.needs_processors and not masked_by_host(seq)


def _is_drawn(seq: Sequence) -> bool:
    """Whether what a sequence samples is drawn from the logits as they are, by the target's own noise. Truncation is
    left to the target: what it cuts off is drafted in vain, which costs less than to draw token by token."""
    return (seq.rule == "coupled" and not seq.state.is_greedy and not seq.state.needs_processors
            and not masked_by_host(seq))


def _draw_of(seq: Sequence) -> Draw:
    state = seq.state
    return GREEDY if state.is_greedy or state.top_k == 1 else Draw(state.temperature, state.seed, len(seq.tokens))


def _cut(steps: Seq[Best], line: int, least: float) -> Samples:
    """A line of a chain, down to the first token that is less likely than `least` to be reached and accepted."""
    tokens: list[int] = []
    chances: list[float] = []
    alive = 1.0
    for step in steps:
        tokens.append(step.tokens[line])
        chances.append(step.chances[line])
        alive *= chances[-1]
        if alive < least:
            break
    return Samples(tokens, confidences=chances)
