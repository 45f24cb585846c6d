"""Decoding on the device by itself: a step of one row per sequence, or of some more with drafts that the device looks
up, captured once for each number of rows, is replayed several times before the host looks at the tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.capture import CapturedSteps, GraphCapture
from paceline.engine.execute.graphs.draft_rows import GROUPS, MOST_HEADED, PLAIN, DraftPlan, Sources, choices
from paceline.engine.execute.graphs.head_drafter import HeadDrafter
from paceline.engine.execute.graphs.in_flight import MOST_REPEATS, RepeatedInFlight
from paceline.engine.execute.graphs.seats import DeviceSeats, send
from paceline.engine.execute.target_heads import GROUP, TargetHeads
from paceline.engine.schedule.sequence import Sequence
from paceline.engine.schedule.step import RowGroup, Step
from paceline.kernels.adapted import adapted
from paceline.kernels.device.interface import DeviceDrafter
from paceline.kernels.device.lookup import MOST_DRAFTED, head_number, looks_up, most_wanted
from paceline.kernels.device.operands import Controls, PackedDrafts, SampledRows
from paceline.kernels.device.repeats import ROUND, Drafts, RepeatInputs, RepeatRows
from paceline.kernels.device.rows import DeviceRows
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM, activations, attention_heads

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)

DEPTHS = (1, 2, 3, 5, 8, MOST_DRAFTED)
"""Tokens that heads draft at a time."""
COMMON_DEPTHS = (5, MOST_DRAFTED)
"""Of requests that do not say how many."""


class DecodeShape(NamedTuple):
    """What a captured step has room for."""

    groups: int
    rows: int
    """As many as groups: nothing is drafted."""
    with_adapters: bool = False
    """Some may have an adapter."""
    heads: tuple[str, ...] = ()
    """Trained heads that some may be drafted for by."""
    depth: int = 0
    """Tokens that they draft for each, of DEPTHS: a pass each for some of them, whoever wants so many."""

    @property
    def most(self) -> int:
        """Tokens that can be drafted for one group."""
        return min(self.rows - self.groups, MOST_DRAFTED)

    def covers(self, other: DecodeShape) -> bool:
        """Whether what fits into the other fits in here, with the same rows."""
        return (self.groups >= other.groups and self.rows == other.rows
                and self.with_adapters >= other.with_adapters and set(self.heads) >= set(other.heads)
                and self.depth >= other.depth)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A step, ready to be replayed on what its inputs hold."""

    shape: DecodeShape
    inputs: RepeatInputs
    views: Seq[RepeatRows]
    """Of each cache group the rows as every time lays them out. Kept, as are the drafts, because the device writes
    there whoever else may have been given the memory."""
    drafts: Drafts
    replay: Callable[[], None]


class DecodeGraphs:
    """Runs steps that Scheduler.schedule(repeat) made."""

    def __init__(self, model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: GraphCapture, seats: DeviceSeats, adapters: AdapterSlots, heads: TargetHeads) -> None:
        """`tables`: the cache's block tables by seat, which the scheduler keeps."""
        assert kernels.device is not None
        self._model = model
        self._kernels = kernels
        self._on_device = kernels.device
        self.drafter: DeviceDrafter = kernels.device
        """Takes part in what is captured from now on."""
        self._heads = attention_heads(model.config)
        self._dtype = activations(model, graphs.device)
        self._storage = storage
        self._host_tables = tables
        self._device = device = graphs.device
        self._seats = seats
        self.most_rows = seats.most_rows
        """Sequences of a step."""
        width = tables[0].shape[1]
        self._tables = [torch.zeros((self.most_rows, width), dtype=torch.int32, device=device) for _ in tables]
        self._out = torch.zeros((MOST_REPEATS, self.most_rows), dtype=torch.int32, device=device)
        self._rounds = torch.zeros((MOST_REPEATS, self.most_rows, ROUND + 1 + MOST_DRAFTED), dtype=torch.int32,
                                   device=device)
        self._verifier = self._on_device.verifier(self.most_rows, MOST_DRAFTED, device)
        self._adapters = adapters
        self._target_heads = heads
        self._head_drafters = {name: HeadDrafter(name, heads, storage, self._tables[GROUP], seats, self._on_device)
                               for name in heads.heads}
        self._captured: CapturedSteps[tuple[DecodeShape, Controls], DecodeGraph] = CapturedSteps(adapters)
        self._planned = DecodeShape(0, 0)
        """What was made ready last."""
        self._graphs = graphs

    def ready(self, running: Seq[Sequence], plan: DraftPlan = PLAIN) -> None:
        """Capture what the running sequences need, if it is not there yet."""
        self._planned = self.shape(running, plan)
        self._for(self._planned, self._seats.seat_all(running))

    def shape(self, sequences: Seq[Sequence], plan: DraftPlan = PLAIN) -> DecodeShape:
        """The least one that has room for these, and for the drafts that are planned."""
        heads = tuple(name for name in self.heads_for(sequences) if name in plan.heads) if plan.rows else ()
        wanted: dict[int, int] = {}
        for seq in sequences if heads else ():
            number = head_number(seq.lookup)
            wanted[number] = max(wanted.get(number, 0), most_wanted(seq.lookup))
        depth = max((self._head_drafters[name].depth(wanted[self._target_heads.number(name)]) for name in heads),
                    default=0)
        return self._room(len(sequences), plan.rows, any(seq.adapter is not None for seq in sequences), heads, depth)

    def heads_for(self, sequences: Seq[Sequence]) -> tuple[str, ...]:
        """Trained heads that draft for some of these, where there are to be drafts."""
        wanted = {head_number(seq.lookup) for seq in sequences}
        return tuple(name for name in self._head_drafters
                     if self._target_heads.number(name) in wanted and name not in self._target_heads.lost)

    def sources(self, sequences: Seq[Sequence]) -> Sources:
        """Where drafts for these can come from."""
        return Sources(self.heads_for(sequences), any(looks_up(seq.lookup) for seq in sequences))

    def lookahead(self, sequences: Seq[Sequence], plan: DraftPlan) -> int:
        """Positions that a step of this shape may take for drafts, of each of these, each time."""
        shape = self.shape(sequences, plan)
        if not shape.heads or any(looks_up(seq.lookup) for seq in sequences):
            return shape.most
        return min(shape.most, max(self._head_drafters[name].reach(shape.depth) for name in shape.heads))

    @property
    def lost_heads(self) -> int:
        return len(self._target_heads.lost)

    def drafts_for(self, seq: Sequence) -> bool:
        """Whether a step can draft for it: by look-ups, or by a head that has not failed."""
        return looks_up(seq.lookup) or (
            seq.lookup > 0 and head_number(seq.lookup) not in self._target_heads.lost_numbers)

    def _room(self, groups: int, rows: int, with_adapters: bool, heads: tuple[str, ...] = (),
              wanted: int = 0) -> DecodeShape:
        fitting = min(next(bucket for bucket in (GROUPS if rows else BUCKETS) if bucket >= groups), self.most_rows)
        shape = DecodeShape(fitting, max(rows, fitting), with_adapters, heads)
        if not heads:
            return shape
        return shape._replace(depth=next(depth for depth in DEPTHS if depth >= min(wanted, shape.most)))

    @torch.inference_mode()
    def launch(self, step: Step, levels: NDArray[np.int64] | None = None) -> RepeatedInFlight:
        """`levels`: how likely drafts are to be accepted (RepeatInputs.levels), where there are to be some."""
        groups, times = step.groups, step.repeat
        self._storage.apply(step.moves, step.copies)
        sequences = [group.seq for group in groups]
        controls = self._seats.seat_all(sequences)
        shape = self.shape(sequences, DraftPlan(step.drafted_rows, step.heads))
        if self._planned.covers(shape):  # who is left out takes no room
            shape = self._planned
        captured = self._for(shape, controls)
        self._upload(captured, groups, levels)
        in_flight = RepeatedInFlight(times, self._device)
        for _ in range(times):
            captured.replay()
        if captured.shape.most:
            in_flight.drafted(self._rounds[:times, :len(groups), :ROUND + 1 + captured.shape.most])
        else:
            in_flight.sampled(self._out[:times, :len(groups)])
        return in_flight

    def _upload(self, captured: DecodeGraph, groups: Seq[RowGroup], levels: NDArray[np.int64] | None) -> None:
        count, inputs = len(groups), RepeatInputs.over(torch.zeros_like(captured.inputs.data, device="cpu"))
        inputs.seats[count:] = -1
        inputs.seats[:count] = torch.tensor([group.seq.allocation.seat for group in groups])
        inputs.ends[:count] = torch.tensor([group.end for group in groups])
        if levels is not None:
            inputs.levels.copy_(torch.from_numpy(levels))
        send(inputs.data.numpy(), captured.inputs.data)
        seats = inputs.seats[:count].numpy()
        pages = (max(group.end for group in groups) - 1) // self._storage.block_size + 1
        for host, table in zip(self._host_tables, self._tables):
            send(host[seats, :pages].astype(np.int32), table[:count, :pages])

    def captures(self) -> list[Callable[[], object]]:
        """What captures a step for each number of rows, plain and with truncated sampling, the largest first: the
        others find its memory. With adapters, and with drafts of each trained head, too where there are some."""
        most, adapters = self.most_rows, (False, True) if self._adapters.layout else (False,)
        plain = [self._room(min(groups, most), 0, own) for groups in BUCKETS if groups <= power(most)
                 for own in adapters]
        heads = [((name,), own.depth(depth)) for name, own in self._head_drafters.items() for depth in COMMON_DEPTHS]
        drafted = [self._room(min(groups, most), rows, own, *by) for groups in GROUPS if groups <= power(most)
                   for rows in choices(groups) for own in adapters
                   for by in [((), 0), *(heads if groups <= MOST_HEADED else ())]]
        return [partial(self._for, shape, Controls(truncation=truncation))
                for shape in sorted({*plain, *drafted}, key=lambda shape: (shape.rows, shape.groups), reverse=True)
                for truncation in (False, True)]

    def release(self) -> None:
        """Let go of all that is captured."""
        self._captured.clear()

    def release_like(self, plan: DraftPlan) -> None:
        """Of steps with drafts, of those that take as much as this one."""
        for large in [key for key in self._captured
                      if (shape := key[0][0]).most and DraftPlan(shape.rows, shape.heads).takes_as_much_as(plan)]:
            del self._captured[large]

    def _for(self, shape: DecodeShape, controls: Controls) -> DecodeGraph:
        return self._captured.find((shape, controls), shape.with_adapters, lambda: self._capture(shape, controls))

    def _capture(self, shape: DecodeShape, controls: Controls) -> DecodeGraph:
        self._seats.prepare(controls)
        inputs = RepeatInputs.over(torch.zeros(RepeatInputs.size(shape.groups), dtype=torch.int64, device=self._device))
        inputs.seats.fill_(-1)  # all is padding
        rows = RepeatRows.of(shape.rows, shape.groups, self._device)
        views = [replace(rows, slots=torch.full_like(rows.slots, -1)) for _ in self._tables]
        drafts = Drafts.of(shape.groups, shape.most, self._device)
        return DecodeGraph(shape, inputs, views, drafts, self._graphs.capture(
            lambda: self._step(shape, inputs, views, drafts, controls)))

    def _step(self, shape: DecodeShape, inputs: RepeatInputs, views: Seq[RepeatRows], drafts: Drafts,
              controls: Controls) -> None:
        """One time; what it notes is what the next one goes on from."""
        on_device, device = self._on_device, self._device
        tables = self._seats.state.tables
        room = on_device.decode_shape(shape.rows)
        if shape.most:
            room = on_device.repeat_shape(shape.rows, shape.groups, 1 + shape.most, self._heads, self._dtype)
            self.drafter.propose(inputs, tables, drafts)
            for name in shape.heads:
                if name not in self._target_heads.lost:
                    with self._target_heads.guarded(name):
                        self._head_drafters[name].propose(inputs, tables, drafts, controls, shape.depth)
        layout_rows = DeviceRows.over(room, torch.empty(room.size, dtype=torch.int32, device=device))
        for blocks, view in zip(self._tables, views):
            if shape.most:
                on_device.spread(inputs, tables, drafts, blocks, layout_rows, view, self._storage.block_size)
            else:
                on_device.begin(inputs, tables, blocks, layout_rows, view, self._storage.block_size)
        rows = views[0]
        logits = self._forward(shape, views, layout_rows)
        if not shape.most:
            sampled, _ = self._seats.sample(logits, SampledRows(rows.seats, rows.positions), controls)
            on_device.end(inputs, sampled, self._out, tables, count=controls.edits)
            return
        sampled, _ = self._seats.sample(logits, SampledRows(rows.seats, rows.positions, rows.parents, rows.tokens),
                                        controls)
        verdicts = self._verifier.verify(
            PackedDrafts(rows.offsets, rows.parents, rows.tokens, rows.seats, 1 + shape.most), sampled, tables,
            count=controls.edits)
        on_device.record(inputs, tables, drafts, verdicts, self._rounds)

    def _forward(self, shape: DecodeShape, views: Seq[RepeatRows], layout_rows: DeviceRows) -> torch.Tensor:
        model, storage, rows = self._model, self._storage, views[0]
        layout = Layout(rows.rope_positions, list(range(shape.rows + 1)), [0] * shape.rows, [None] * shape.rows,
                        storage.block_size,
                        [GroupView(blocks[:shape.groups], view.slots, group.window)
                         for group, blocks, view in zip(model.cache_groups, self._tables, views)], layout_rows)
        slots = self._seats.state.tables.adapters(rows.seats) if shape.with_adapters else None
        context = Forward(adapted(self._kernels, self._adapters, slots), layout, storage.keys, storage.values,
                          model.cache_groups, self._target_heads.taps, key_scales=storage.key_scales,
                          value_scales=storage.value_scales)
        hidden = model.forward(rows.tokens, context)
        self._target_heads.store(rows.tokens, context)
        return model.logits(hidden, context.kernels)


def power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
