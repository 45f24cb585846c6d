"""What a model that drafts samples, on the device: a replay after its captured forward, and a few numbers come back.

A draft decides nothing: whatever is sampled here, the target's tokens are the same. So the device samples where it can
(the tokens are the host's as everywhere) and leaves the rest to the host's pipeline: penalties and masks, which would
have to follow the draft above each row, and rules that read the whole distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.drafting.sampler import Place
from paceline.engine.execute.graphs.logits_buffer import AfterSampling, LogitsBuffer
from paceline.engine.execute.graphs.seats import MOST_ROWS
from paceline.engine.execute.graphs.step_graphs import StepGraphs
from paceline.engine.rows.sample_rows import masked_by_host
from paceline.engine.schedule.sequence import Placement
from paceline.sampling.logprobs import unpacked
from paceline.speculation.models import NO_SAMPLES, SAMPLED_RULES, Samples

SIBLINGS = (0, 1, 3, 7, 15)
"""How many more than one token are sampled, so that few different graphs are captured."""


class DeviceDraftSampler:
    """Samples for all models that draft in an engine, with its requests' seats."""

    def __init__(self, graphs: StepGraphs) -> None:
        self._graphs = graphs.samples
        self.memory = graphs.memory

    def takes(self, logits: LogitsBuffer, places: Seq[Place]) -> bool:
        """Whether the device can sample at all these places."""
        return (logits.rows <= MOST_ROWS and logits.logits.shape[1] == self._graphs.seats.state.tables.vocab_size
                and all(map(_sampled_here, places)))

    @torch.inference_mode()
    def sample(self, logits: LogitsBuffer, places: Seq[Place], rows: Seq[int]) -> list[Samples]:
        """The Samples of each place; rows[i]: where the logits of the i-th lie. Waits for the device."""
        seats = self._graphs.seats
        controls = seats.seat_all(list(dict.fromkeys(place.seq for place in places)))
        most = max(place.count for place in places)
        controls = replace(controls, logprobs=1, further=next(size for size in SIBLINGS if size >= most - 1))
        graph = self._graphs.ready(logits, controls, AfterSampling.NOTHING)
        wanted = np.full((2, logits.rows), -1, dtype=np.int64)
        wanted[0, rows] = [place.seq.allocation.seat for place in places]
        wanted[1, rows] = [place.position for place in places]
        logits.set_sampled(wanted)
        graph.replay()
        tokens, scores = (part.cpu().numpy() for part in graph.out)
        return [_samples(tokens[:, row], scores[:, row], place) for row, place in zip(rows, places)]


def _sampled_here(place: Place) -> bool:
    seq, state = place.seq, place.seq.state
    if seq.placement is Placement.HOST or state.needs_processors or masked_by_host(seq):
        return False
    return place.count <= 1 + SIBLINGS[-1] and (state.is_greedy or seq.rule not in SAMPLED_RULES)


def _samples(tokens: NDArray[np.int32], scores: NDArray[np.int32], place: Place) -> Samples:
    """Of a row: what came, what would have come without it, and so on; negative where there was nothing left."""
    found = [unpacked(own, int(token), 0) for token, own in zip(tokens[:place.count], scores) if token >= 0]
    if not found:
        return NO_SAMPLES
    # A point mass knows no doubt; the model's own distribution does.
    greedy = place.seq.state.is_greedy
    return Samples([own.token for own in found],
                confidences=[math.exp(own.raw if greedy else own.processed) for own in found])
