"""Steps that a device runs by itself: the next one is launched before the host has read what the last one drew, so the
device does not wait while the host books tokens and plans."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.graphs.in_flight import MOST_REPEATS, InFlight, Sampled
from paceline.engine.rows.placement import decided_on_device
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.step import Step
from paceline.kernels.interface import Kernels
from paceline.models.interface import CausalLM
from paceline.sampling.masks import Mask

if TYPE_CHECKING:
    from paceline.engine.drafting.device_sampler import DeviceDraftSampler
    from paceline.engine.execute.graphs.decode import DecodeGraphs
    from paceline.engine.execute.graphs.prefill import Begun, PrefillGraphs
    from paceline.engine.execute.graphs.sample import SampleGraphs
    from paceline.engine.execute.graphs.verify import VerifyGraphs
    from paceline.engine.execute.runner import Runner

log = logging.getLogger("paceline.engine")
AHEAD = 2
"""Steps that are launched and not booked yet, at most."""
ROUND_TRIP, QUIET_ROUND_TRIP = 0.025, 0.2
"""Seconds that a request that comes meanwhile may have to wait for the device: while requests keep coming, and when
none has come for QUIET seconds."""
QUIET = 1.0


class DeviceSteps:
    """The steps in flight on a device, oldest first."""

    def __init__(self, decoder: DecodeGraphs, mixed: PrefillGraphs, drafts: VerifyGraphs, draws: SampleGraphs) -> None:
        self.decoder: DecodeGraphs | None = decoder
        """None: there is no memory to capture its steps."""
        self.mixed = mixed
        self.drafts = drafts
        self.draws = draws
        self.launched: deque[InFlight] = deque()
        self.begun: Begun | None = None
        """The step behind them, if its draws wait until those are booked: for the host's word on what the newest tokens
        bar, or for memory."""
        self._step_seconds = ROUND_TRIP
        """What a repeated step took last on the device."""
        self._host_seconds = 0.0
        """What the host needed last between two waits for the device."""
        self._read_at: float | None = None

    def plan(self, scheduler: Scheduler, since_arrival: float) -> Step | None:
        """The next step, if its tokens need not be known on the host; else, and if nothing can be planned now, None."""
        running = scheduler.running
        if len(self.launched) >= AHEAD or self.begun is not None or not all(seq.runs_ahead for seq in running):
            return None
        repeat = 0
        if (self.decoder is not None and scheduler.can_repeat() and len(running) <= self.decoder.most_rows
                and not any(seq.emitter.scored for seq in running)):
            if self.decoder.ready(running):
                repeat = self.repeats(running, scheduler.queue_length, since_arrival)
            else:
                self.decoder = None
        return scheduler.schedule(repeat)

    def launch(self, step: Step, runner: Runner) -> bool:
        """False: nothing was launched, the step needs the host or finds no memory. One that is repeated, or has begun
        to move what the cache holds, raises torch.OutOfMemoryError. Where the host has its word before the draws, or
        there is no memory for them, the step is `begun`."""
        if step.repeated and self.decoder is not None:
            self.launched.append(self.decoder.launch(step))
            return True
        if runner.graphs is None or not all(group.seq.runs_ahead and group.draft is None and decided_on_device(group)
                                            for group in step.groups):
            return False
        batch = runner.prepare(step)
        if not batch.on_host:
            return False
        begun = self.mixed.begin(batch)
        if begun is None:
            return False
        free = all(group.seq.free_running for group in step.groups)
        if not (free and self.finish(begun)):
            self.begun = begun
        return True

    def finish(self, begun: Begun, masks: Seq[Mask | None] = ()) -> bool:
        """Draw: everybody in the step draws freely, or the host has booked all steps in front of it and says what it
        bars at each row that is drawn from. False: there is no memory for it, and nothing was drawn."""
        launched = self.mixed.draw(begun, masks)
        if launched is not None:
            self.launched.append(launched)
        return launched is not None

    def forget(self) -> None:
        """Whatever is under way is not to be read."""
        self.launched.clear()
        self.begun = None

    def give_up_repeating(self) -> None:
        """There was no memory to capture a repeated step: one that was planned can only be planned anew."""
        log.warning("no memory to capture repeated steps: tokens are decoded one step at a time from now on, which is "
                    "slower; give the cache fewer kv_blocks")
        self.decoder = None

    def read(self) -> list[Sampled]:
        """Per group what the oldest step drew. Waits for it."""
        launched = self.launched.popleft()
        asked = time.perf_counter()
        if self._read_at is not None:
            self._host_seconds = min(asked - self._read_at, ROUND_TRIP)
        drawn = launched.read()
        self._read_at = time.perf_counter() if self.launched else None
        if launched.step.repeated:
            self._step_seconds = launched.seconds
        return drawn

    def stale(self) -> Step | None:
        """The oldest step, taken out unread, if all its sequences have ended meanwhile."""
        if self.launched and all(group.seq.status is Status.FINISHED for group in self.launched[0].step.groups):
            return self.launched.popleft().step
        return None

    def repeats(self, running: Seq[Sequence], waiting: int, since_arrival: float) -> int:
        """How often the next step should run: as long as a newcomer may wait, for this one and the one before it, and
        as somebody has tokens to come. With others in the queue just long enough for the host to keep up: who ends
        inside keeps them from a seat."""
        longest = max(seq.limit - seq.computed - 1 for seq in running)
        most, patience = MOST_REPEATS, QUIET_ROUND_TRIP if since_arrival > QUIET else ROUND_TRIP
        wanted = patience / AHEAD / self._step_seconds
        if waiting:
            most, wanted = MOST_REPEATS // 2, 1.0 + 1.5 * self._host_seconds / self._step_seconds
        return max(1, min(most, int(wanted), longest))


def captured_steps(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                   device: torch.device) -> DeviceSteps | None:
    """For engines whose kernels run whole steps on a device."""
    if kernels.device is None or not model.capturable:
        return None
    from paceline.engine.execute.graphs.capture import GraphCapture
    from paceline.engine.execute.graphs.decode import DecodeGraphs
    from paceline.engine.execute.graphs.forward import ForwardGraphs
    from paceline.engine.execute.graphs.logits_buffer import LogitsBuffers
    from paceline.engine.execute.graphs.prefill import PrefillGraphs
    from paceline.engine.execute.graphs.sample import SampleGraphs
    from paceline.engine.execute.graphs.seats import DeviceSeats
    from paceline.engine.execute.graphs.verify import VerifyGraphs

    graphs, vocab_size = GraphCapture(device), model.config.vocab_size
    seats = DeviceSeats(tables[0].shape[0], vocab_size, device, kernels.device)
    draws, handovers = SampleGraphs(graphs, seats, storage), LogitsBuffers(vocab_size, len(tables), device)
    prompts = ForwardGraphs(model, kernels, storage, tables, graphs, handovers, seats.state.tables.last_tokens,
                              drawn_rows_only=True)
    drafted = ForwardGraphs(model, kernels, storage, tables, graphs, handovers)
    return DeviceSteps(DecodeGraphs(model, kernels, storage, tables, graphs, seats), PrefillGraphs(prompts, draws),
                       VerifyGraphs(drafted, draws), draws)


def captured_reads(model: CausalLM, kernels: Kernels, storage: KVStorage, tables: Seq[np.ndarray],
                   device: torch.device) -> VerifyGraphs | None:
    """Likewise the forwards of a model that drafts; draft_sampler draws behind them."""
    if kernels.device is None or not model.capturable:
        return None
    from paceline.engine.execute.graphs.capture import GraphCapture
    from paceline.engine.execute.graphs.forward import ForwardGraphs
    from paceline.engine.execute.graphs.logits_buffer import LogitsBuffers
    from paceline.engine.execute.graphs.verify import VerifyGraphs

    return VerifyGraphs(ForwardGraphs(model, kernels, storage, tables, GraphCapture(device),
                                       LogitsBuffers(model.config.vocab_size, len(tables), device)))


def draft_sampler(steps: DeviceSteps | None) -> DeviceDraftSampler | None:
    """What draws for models that draft, where captured steps draw on the device."""
    if steps is None:
        return None
    from paceline.engine.drafting.device_sampler import DeviceDraftSampler

    return DeviceDraftSampler(steps.draws)
