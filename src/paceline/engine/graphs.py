"""Decoding on the device by itself: a step of one row a sequence, captured once for each number of rows, is replayed
several times before the host looks at the tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.sequence import Sequence
from paceline.engine.step import RowGroup, Step
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads
from paceline.kernels.triton.backend import TritonKernels
from paceline.kernels.triton.rows import DeviceRows
from paceline.kernels.triton.stepping_device import begin_kernel, end_kernel
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.sampling.device.sampler import DeviceSampler, Rows
from paceline.sampling.device.state import Controls, DeviceState, Seated

log = logging.getLogger("paceline.engine")
MOST_REPEATS = 16
ROUND_TRIP, QUIET_ROUND_TRIP = 0.025, 0.2
"""Seconds that a request that comes meanwhile may have to wait for the device: while requests keep coming, and when
none has come for QUIET seconds."""
QUIET = 1.0
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class Graphs:
    """Captures what is launched on a device. On a CPU, where Triton is interpreted, nothing is captured and the same
    launches are made each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Runs `launch` a few times, then keeps it: what it reads and writes must lie where it lay."""
        if self.device.type != "cuda":
            launch()
            return launch
        # Twice before: what the first run compiles must not be compiled inside a capture.
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            launch()
            launch()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph.replay


class DeviceDecoder:
    """Runs steps that Scheduler.schedule(repeat) made."""

    def __init__(self, model: CausalLM, kernels: TritonKernels, storage: KVStorage, tables: Seq[np.ndarray],
                 graphs: Graphs) -> None:
        """`tables`: the cache's block tables by seat, which the scheduler keeps."""
        self._model = model
        self._kernels = kernels
        self._storage = storage
        self._host_tables = tables
        self._device = device = graphs.device
        seats, width = tables[0].shape
        self.most_rows = min(seats, BUCKETS[-1])
        self._state = DeviceState(seats, model.config.vocab_size, device)
        self._sampler = DeviceSampler(self._state, self.most_rows)
        self._seated: list[tuple[Sequence, int] | None] = [None] * seats
        """Who sat there, in which epoch, when the device was last told."""
        self._tables = [torch.zeros((self.most_rows, width), dtype=torch.int32, device=device) for _ in tables]
        self._out = torch.zeros((MOST_REPEATS, self.most_rows), dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, Controls], _Captured] = {}
        self._graphs = graphs
        self._seconds = ROUND_TRIP
        """What a step took last."""

    def ready(self, running: Seq[Sequence]) -> bool:
        """Capture what the running sequences need, if it is not there yet. False: the device has no memory left for
        it, and steps have to be launched one by one. More than most_rows need nothing: they are not run here."""
        if len(running) > self.most_rows:
            return True
        try:
            self._seat(running)
            self._for(len(running), self._state.controls([seq.allocation.seat for seq in running]))
        except torch.OutOfMemoryError:
            log.warning("no memory to capture a step of %d sequences: steps are launched kernel by kernel from now on, "
                        "which is slower; give the cache fewer kv_blocks", len(running))
            return False
        return True

    def repeats(self, running: Seq[Sequence], waiting: int, since_arrival: float) -> int:
        """How often the next step should run: as long as a newcomer may wait, and as somebody has tokens to come. With
        others in the queue half as long: who ends inside keeps them from a seat."""
        longest = max(seq.limit - len(seq.tokens) for seq in running)
        most = MOST_REPEATS // 2 if waiting else MOST_REPEATS
        patience = QUIET_ROUND_TRIP if since_arrival > QUIET else ROUND_TRIP
        return max(1, min(most, int(patience / self._seconds), longest))

    @torch.inference_mode()
    def run(self, step: Step) -> list[list[int]]:
        """Per group the tokens drawn, one a repeat; -1 where none could be."""
        begun = time.perf_counter()
        groups, repeat = step.groups, step.repeat
        self._storage.apply(step.moves, step.copies)
        self._seat([group.seq for group in groups])
        seats = [group.seq.allocation.seat for group in groups]
        captured = self._for(len(groups), self._state.controls(seats))
        self._upload(captured, groups, seats, repeat)
        for _ in range(repeat):
            captured.replay()
        drawn = self._out[:repeat, :len(groups)].cpu().numpy()
        self._seconds = (time.perf_counter() - begun) / repeat
        tokens: list[list[int]] = drawn.T.tolist()
        return tokens

    def _seat(self, sequences: Seq[Sequence]) -> None:
        """Tell the device about those it does not know in their seats."""
        fresh = []
        for seq in sequences:
            seat = seq.allocation.seat
            if self._seated[seat] != (seq, seq.epoch):
                self._seated[seat] = (seq, seq.epoch)
                fresh.append(Seated(seat, seq.state, len(seq.tokens), seq.tokens[-1]))
        self._state.assign(fresh)

    def _upload(self, captured: _Captured, groups: Seq[RowGroup], seats: list[int], repeat: int) -> None:
        count, rows = len(groups), captured.rows
        inputs = np.zeros(3 * rows + 1, dtype=np.int64)
        tokens, positions, places = inputs[:-1].reshape(3, rows)
        positions[count:] = -1
        tokens[:count] = [group.tokens[0] for group in groups]
        positions[:count] = [group.start for group in groups]
        places[:count] = seats
        captured.inputs.copy_(torch.from_numpy(inputs), non_blocking=True)
        pages = (int(positions[:count].max()) + repeat - 1) // self._storage.block_size + 1
        for host, table in zip(self._host_tables, self._tables):
            table[:count, :pages].copy_(torch.from_numpy(host[seats, :pages].astype(np.int32)), non_blocking=True)

    def _for(self, count: int, controls: Controls) -> _Captured:
        rows = min(next(bucket for bucket in BUCKETS if bucket >= count), self.most_rows)
        found = self._captured.get((rows, controls))
        if found is None:
            found = self._captured[rows, controls] = self._capture(rows, controls)
        return found

    def _capture(self, rows: int, controls: Controls) -> _Captured:
        self._sampler.prepare(controls)
        inputs = torch.zeros(3 * rows + 1, dtype=torch.int64, device=self._device)
        inputs[rows:2 * rows] = -1
        replay = self._graphs.capture(lambda: self._step(rows, inputs, controls))  # all rows are padding
        inputs[3 * rows] = 0
        return _Captured(rows, inputs, replay)

    def _step(self, rows: int, inputs: torch.Tensor, controls: Controls) -> None:
        """One step of the rows in `inputs`, which become those of the step after it."""
        model, kernels, storage, device = self._model, self._kernels, self._storage, self._device
        config = model.config
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        shape = kernels.rows_shape(rows, 1, 0, heads, next(iter(storage.keys.values())).dtype)
        layout_rows = DeviceRows.over(shape, torch.empty(shape.size, dtype=torch.int32, device=device))
        rope, draw = torch.empty((2, rows), dtype=torch.int64, device=device)
        seats = torch.empty(rows, dtype=torch.int32, device=device)
        views = []
        block = _power(rows)
        for group, table in zip(model.cache_groups, self._tables):
            slots = torch.empty(rows, dtype=torch.int64, device=device)
            begin_kernel[(1,)](
                inputs, table, table.stride(0), layout_rows.group, layout_rows.positions, layout_rows.prefix,
                layout_rows.tiles, slots, rope, draw, seats, rows, BLOCK_SIZE=storage.block_size, BLOCK=block)
            views.append(GroupView(table[:rows], slots, group.window))
        layout = Layout(rope, list(range(rows + 1)), [0] * rows, [None] * rows, storage.block_size, views, layout_rows)
        context = Forward(kernels, layout, storage.keys, storage.values, model.cache_groups,
                          key_scales=storage.key_scales, value_scales=storage.value_scales)
        logits = model.logits(model.forward(inputs[:rows], context), kernels)
        drawn = self._sampler.sample(logits, Rows(seats, draw), controls)
        end_kernel[(1,)](inputs, drawn.tokens, self._out, self._out.stride(0), rows, BLOCK=block)


class _Captured:
    """A step of `rows` rows, ready to be replayed on what its inputs hold."""

    __slots__ = ("inputs", "replay", "rows")

    def __init__(self, rows: int, inputs: torch.Tensor, replay: Callable[[], None]) -> None:
        self.rows = rows
        self.inputs = inputs
        self.replay = replay


def _power(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
