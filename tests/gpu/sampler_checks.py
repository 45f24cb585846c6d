"""Is the device's sampler the host's? Tokens, log-probabilities, verdicts and moves compared on rows of every kind.

Runs where Triton does: on a card, or for a small vocabulary in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.device import columns
from paceline.kernels.device.operands import Controls, PackedDrafts, SampledRows
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton import load
from paceline.kernels.triton.sampling.sampler import TritonSampler
from paceline.request import SamplingParams
from paceline.sampling import Pipeline, SampleRow, SampleState
from paceline.sampling.device.state import DeviceState, Seated
from paceline.sampling.logprobs import token_logprobs, unpacked
from paceline.sampling.noise import gumbel, token_bits
from paceline.sampling.processed import Processed
from paceline.speculation.rules.coupled import coupled

POSITION = 1000
_NEAR = 1e-4
"""Two perturbed scores this close are a tie between the host's logarithms and the device's."""


def requests(width: int) -> list[SamplingParams]:
    """One of every kind of request."""
    listed = {token: float(value) for token, value in zip(range(3, width, max(1, width // 9)), range(-4, 5))}
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=0.8, top_k=50),
        SamplingParams(top_p=0.95),
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
        SamplingParams(top_k=width // 3, top_p=0.99),
        SamplingParams(temperature=1.5, min_p=0.05),
        SamplingParams(top_k=1000, top_p=0.8, min_p=0.001),
        SamplingParams(temperature=0.1, top_k=width // 2),
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        SamplingParams(temperature=0.0, repetition_penalty=1.1, min_tokens=999, max_tokens=1000, stop_token_ids=(2, 3)),
        SamplingParams(top_p=0.9, logit_bias=listed),
        SamplingParams(allowed_token_ids=tuple(range(0, width, 7))),
    ]


def logit_rows(rows: int, width: int, seed: int) -> Tensor:
    """Raw logits of three kinds in turn: like those of a language model, flat, and rounded so that many are equal."""
    rng = np.random.default_rng(seed)
    x = np.empty((rows, width), dtype=np.float32)
    for row in range(rows):
        x[row] = rng.standard_normal(width) * 1.3
        if row % 3 == 0:
            x[row] = x[row] * 0.4 - 1.6 * np.log1p(rng.permutation(width)) + 9.0
        if row % 3 == 2:
            x[row] = torch.from_numpy(x[row]).bfloat16().float().numpy()
    return torch.from_numpy(x)


class Batch:
    """`rows` requests of every kind in turn (or of one), seated on a device, and the host's view of the same."""

    def __init__(self, rows: int, width: int, device: torch.device, *, only: SamplingParams | None = None,
                 seed: int = 0, block: int | None = None) -> None:
        kinds = [only] if only is not None else requests(width)
        rng = np.random.default_rng(seed)
        self.width = width
        self.logits = logit_rows(rows, width, seed)
        self.host_rows = []
        for row in range(rows):
            prompt = rng.integers(0, width, POSITION - 20).tolist()
            state = SampleState(kinds[row % len(kinds)], prompt, int(rng.integers(0, 1 << 63)), width)
            state.append(rng.integers(0, width, 20).tolist())
            self.host_rows.append(SampleRow(state, POSITION))
        self.state = DeviceState(SeatTables(rows, width, device), load(True, device).device)
        self.state.assign([Seated(row, one.state, POSITION) for row, one in enumerate(self.host_rows)])
        self.sampler = TritonSampler(self.state.tables, rows, block=block)
        self.on_device = self.logits.to(device)
        self.rows = SampledRows(torch.arange(rows, dtype=torch.int32, device=device),
                         torch.full((rows,), POSITION, dtype=torch.int64, device=device))
        self.controls = self.state.controls()

    def draw(self, controls: Controls | None = None) -> Tensor:
        return self.sampler.sample(self.on_device, self.rows, controls or self.controls)


@dataclass
class Findings:
    """What was compared and what differed, each with enough to see why."""

    compared: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, same: bool, **facts: Any) -> None:
        self.compared += 1
        if not same:
            self.wrong.append({"what": what, **facts})

    def as_dict(self) -> dict[str, Any]:
        return {"compared": self.compared, "near_ties": self.near_ties, "wrong": self.wrong[:20],
                "wrong_in_all": len(self.wrong)}


def check(device: torch.device, width: int, rows: int, seed: int = 0, block: int | None = None) -> Findings:
    """Everything that can be compared, on `rows` rows of a vocabulary of `width`."""
    found = Findings()
    batch = Batch(rows, width, device, seed=seed, block=block)
    pipeline = Pipeline(width)
    processed = pipeline.process(batch.logits, batch.host_rows)
    expected = pipeline.choose(processed)
    controls = Controls(batch.controls.edits, batch.controls.truncation, 5)
    drawn = batch.draw(controls)
    tokens = drawn.tolist()
    for row, (ours, theirs) in enumerate(zip(tokens, expected)):
        gap = _gap(processed.support(row), batch.host_rows[row], ours, theirs) if ours != theirs else 0.0
        kind = f"{batch.host_rows[row].state.params.temperature:g} {processed.processors(row)}"
        if ours != theirs and gap < _NEAR:
            found.compared += 1
            found.near_ties.append({"row": row, "kind": kind, "gap": gap})
        else:
            found.note("token", ours == theirs, row=row, kind=kind, device=ours, host=theirs, gap=gap)
    scores = batch.sampler.logprobs(batch.on_device, batch.rows, drawn, controls).cpu().numpy()
    alike = [row for row in range(rows) if tokens[row] == expected[row]]
    for row, score in zip(alike, token_logprobs(batch.logits, processed, alike, [tokens[i] for i in alike],
                                                [5] * len(alike))):
        own = unpacked(scores[row], tokens[row], 5)
        near = abs(own.raw - score.raw) < 1e-5 and abs(own.processed - score.processed) < 1e-5
        found.note("logprob", near, row=row, device=(own.raw, own.processed), host=(score.raw, score.processed))
        found.note("rank", own.rank == score.rank, row=row)
        found.note("alternatives", list(own.top) == list(score.top), row=row)
    _check_siblings(batch, processed, controls, tokens, found)
    _check_company(batch, tokens, found)
    _check_verdicts(device, found, seed)
    return found


def _check_siblings(batch: Batch, processed: Processed, controls: Controls, tokens: list[int],
                    found: Findings) -> None:
    """What would have been drawn without the tokens before it: the support by score and noise, the best first."""
    further = 3
    several, scores = batch.sampler.several(batch.on_device, batch.rows, replace(controls, further=further))
    for row, state in enumerate(one.state for one in batch.host_rows):
        if state.is_greedy:
            values = processed.logits_of(row).float().numpy()
            ids = np.flatnonzero(values > -np.inf)
            values = values[ids].astype(np.float64)
        else:
            ids, support = processed.support(row)
            values = support.astype(np.float64) + gumbel(token_bits(state.seed, POSITION, ids))
        order = np.lexsort((ids, -values))[:1 + further]
        expected, ours = ids[order].tolist(), several[:, row].tolist()
        gaps = np.diff(values[order]) if len(order) > 1 else np.zeros(1)
        if tokens[row] == ours[0] and (-gaps > _NEAR).all():
            padded = expected + [columns.EMPTY] * (1 + further - len(expected))
            found.note("siblings", ours == padded, row=row, device=ours, host=padded)
        for number, token in enumerate(ours):
            if 0 <= token != tokens[row]:
                own, theirs = unpacked(scores[number, row].cpu().numpy(), token, 0), processed.logprob(row, token)
                found.note("sibling's logprob", state.is_greedy or abs(own.processed - theirs) < 1e-5, row=row,
                           device=own.processed, host=theirs)


def _gap(support: tuple[NDArray[np.int64], NDArray[np.float32]], row: SampleRow, ours: int, theirs: int) -> float:
    """How far apart two tokens' perturbed scores are; infinite where one is not in the host's support at all."""
    values = []
    for token in (ours, theirs):
        at = np.flatnonzero(support[0] == token)
        if not len(at):
            return float("inf")
        noise = 0.0 if row.state.is_greedy else float(gumbel(token_bits(row.state.seed, row.position, token))[0])
        values.append(float(support[1][at[0]]) + noise)
    return abs(values[0] - values[1])


def _check_company(batch: Batch, tokens: list[int], found: Findings) -> None:
    """Rows drawn a few at a time, with padding, are what they were in one call."""
    for first in range(0, len(tokens), 7):
        part = slice(first, first + 7)
        seats = batch.rows.seats[part].clone()
        seats[0] = -1
        positions = torch.full(seats.shape, POSITION, dtype=torch.int64, device=seats.device)
        few = batch.sampler.sample(batch.on_device[part], SampledRows(seats, positions), batch.controls)
        found.note("in other company", few.tolist() == [-1, *tokens[part][1:]], first=first)


def _check_verdicts(device: torch.device, found: Findings, seed: int) -> None:
    """Random trees whose drafts are often right: verdicts, and where the cache's rows end up."""
    rng = np.random.default_rng(seed)
    offsets: list[int] = [0]
    parents: list[int] = []
    fed: list[int] = []
    drawn: list[int] = []
    seats: list[int] = []
    groups = []
    for group in range(12):
        size = int(rng.integers(1, 24))
        above = [-1, *(int(rng.integers(0, row)) for row in range(1, size))]
        tree, own = rng.integers(0, 2, size).tolist(), rng.integers(0, 2, size).tolist()
        parents += [-1 if parent < 0 else offsets[-1] + parent for parent in above]
        fed, drawn, seats = fed + tree, drawn + own, seats + [group] * size
        offsets.append(len(parents))
        groups.append((above, tree, own))

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    drafts = PackedDrafts(ints(offsets), ints(parents), ints(fed), ints(seats), 24)
    kernels = load(True, device).device
    verdicts = kernels.verifier(12, 24, device).verify(drafts, ints(drawn), SeatTables(12, 64, device))
    plane = torch.randn(offsets[-1] + 3, 2, 8).to(torch.bfloat16).to(device)
    after = plane.clone()
    slots = torch.from_numpy(rng.permutation(offsets[-1] + 3)[:offsets[-1]]).to(device)
    for group, (above, tree, own) in enumerate(groups):
        verdict, base = coupled(above, tree, own), offsets[group]
        count = len(verdict.tokens)
        found.note("verdict", verdicts.tokens[group, :count].tolist() == verdict.tokens
                   and verdicts.rows[group, :count].tolist() == [base + row for row in verdict.rows]
                   and int(verdicts.accepted[group]) == len(verdict.path)
                   and bool(verdicts.bonus[group]) == verdict.bonus, group=group)
        for depth, row in enumerate(verdict.path, 1):
            after[slots[base + depth]] = plane[slots[base + row]]
    kernels.compaction([plane]).move(drafts.offsets, verdicts.accepted, verdicts.rows, slots)
    found.note("compaction", torch.equal(plane, after))
