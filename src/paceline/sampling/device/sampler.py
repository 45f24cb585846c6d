"""PipelineSampler: the host's pipeline over the seats' tables, for devices without sampling kernels of their own.

What a seat's request asks for, its counts among it, is read from the tables and not from the request: a device that
runs ahead of the host has sampled tokens that the host does not know of yet.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import StepError
from paceline.kernels.device import columns
from paceline.kernels.device.operands import Controls, SampledRows
from paceline.kernels.device.seats import SeatTables
from paceline.request import SamplingParams
from paceline.sampling.logprobs import token_logprobs
from paceline.sampling.native import load as native_sampler
from paceline.sampling.noise import gumbel, token_bits
from paceline.sampling.pipeline import Pipeline, Processed
from paceline.sampling.processors import SampleRow
from paceline.sampling.state import SampleState

Words = NDArray[np.int64]


class PipelineSampler:
    """Implements kernels.device.interface.Sampler. Edits are made here, on a copy of the logits; everything after them
    is the pipeline's."""

    def __init__(self, tables: SeatTables) -> None:
        self._tables = tables
        self._pipeline = Pipeline(tables.vocab_size, native_sampler())
        self._states: dict[int, tuple[bytes, SampleState]] = {}
        """By seat, with the row of the table that it was made of."""

    def prepare(self, controls: Controls) -> None:
        if controls.edits or controls.masks:
            self._tables.prepare()

    def sample(self, logits: Tensor, rows: SampledRows, controls: Controls) -> Tensor:
        self.prepare(controls)
        live, processed = self._processed(logits, rows)
        return self._spread(live, self._chosen(processed), len(logits))

    def several(self, logits: Tensor, rows: SampledRows, controls: Controls) -> tuple[Tensor, Tensor]:
        self.prepare(controls)
        live, processed = self._processed(logits, rows)
        found = np.full((1 + controls.further, len(live)), columns.EMPTY, dtype=np.int32)
        for at, first in enumerate(self._chosen(processed)):
            ranked = [first] if first < 0 else [first, *(token for token in _ranked(processed, at) if token != first)]
            ranked = ranked[:len(found)]
            found[:len(ranked), at] = ranked
        return (torch.stack([self._spread(live, own.tolist(), len(logits)) for own in found]),
                torch.stack([self._scores(logits, live, processed, own.tolist(), controls) for own in found]))

    def logprobs(self, logits: Tensor, rows: SampledRows, sampled: Tensor, controls: Controls) -> Tensor:
        live, processed = self._processed(logits, rows)
        return self._scores(logits, live, processed, sampled[live].tolist(), controls)

    def _processed(self, logits: Tensor, rows: SampledRows) -> tuple[list[int], Processed]:
        """The rows that have a seat, and their distributions."""
        seats, positions = rows.seats.tolist(), rows.positions.tolist()
        live = [row for row, seat in enumerate(seats) if seat >= 0]
        table = self._tables.table.cpu().numpy()
        edited = logits[live].float().cpu()  # a copy
        for at, row in enumerate(live):
            self._edit(edited[at], table[seats[row]], seats[row], row, positions[row], rows)
        return live, self._pipeline.process(
            edited, [SampleRow(self._state(seats[row], table[seats[row]]), positions[row]) for row in live])

    def _state(self, seat: int, words: Words) -> SampleState:
        """A request that asks for what the seat's does after the edits."""
        kept = self._states.get(seat)
        if kept is not None and kept[0] == words.tobytes():
            return kept[1]
        reals, flags, width = words.view(np.float64), int(words[columns.FLAGS]), self._tables.vocab_size
        params = SamplingParams(
            temperature=0.0 if flags & columns.GREEDY else float(reals[columns.TEMPERATURE]),
            top_k=int(words[columns.TOP_K]) if flags & columns.RANKED else 0,
            top_p=float(reals[columns.TOP_P]) if flags & columns.NUCLEUS else 1.0,
            min_p=min(1.0, math.exp(reals[columns.LOG_MIN_P])) if flags & columns.FLOORED else 0.0)
        state = SampleState(params, (), int(words[columns.SEED]) & (1 << 64) - 1, width)
        self._states[seat] = (words.tobytes(), state)
        return state

    def _edit(self, x: Tensor, words: Words, seat: int, row: int, position: int, rows: SampledRows) -> None:
        """Penalties, bias and masks on the logits x [V] of a row, in place. A NaN stays one: the row's error must not
        be hidden."""
        tables, flags = self._tables, int(words[columns.FLAGS])
        if flags & columns.PENALISED and tables.counts is not None:
            _penalise(x, tables.counts[seat].cpu() + 2 * self._drafted(row, rows), words.view(np.float64))
        if flags & columns.BIASED:
            early = position < int(words[columns.EARLY_UNTIL])
            entries = int(words[columns.LISTED_EARLY if early else columns.LISTED])
            # A token may come twice: a bias, and as a stop token that comes too early.
            for token, value in zip(tables.ids[seat, :entries].tolist(), tables.values[seat, :entries].tolist()):
                if value > -math.inf:
                    x[token] += value
                elif not x[token].isnan():
                    x[token] = value
        if flags & columns.MASKED and tables.masks is not None:
            _mask(x, tables.masks[seat])
        if rows.masks is not None and rows.masked is not None and int(rows.masked[row]):
            _mask(x, rows.masks[row])

    def _drafted(self, row: int, rows: SampledRows) -> Tensor:
        """[V] int32: how often each token was fed at the row and above it, up to the root, which is no draft."""
        times = torch.zeros(self._tables.vocab_size, dtype=torch.int32)
        if rows.parents is not None and rows.fed is not None:
            while (above := int(rows.parents[row])) >= 0:
                times[int(rows.fed[row])] += 1
                row = above
        return times

    def _chosen(self, processed: Processed) -> list[int]:
        """One token per row, or why there is none."""
        tokens = self._pipeline.choose(processed)
        for row, error in processed.errors.items():
            tokens[row] = columns.NAN if isinstance(error, StepError) else columns.EMPTY
        return tokens

    def _spread(self, live: list[int], tokens: list[int], count: int) -> Tensor:
        out = torch.full((count,), columns.EMPTY, dtype=torch.int32)
        out[live] = torch.tensor(tokens, dtype=torch.int32)
        return out.to(self._tables.device)

    def _scores(self, logits: Tensor, live: list[int], processed: Processed, tokens: list[int],
                controls: Controls) -> Tensor:
        number = min(max(controls.logprobs or 0, 1), self._tables.vocab_size)
        out = np.zeros((len(logits), 3 + 2 * number), dtype=np.int32)
        reals = out.view(np.float32)
        reals[:, :2], out[:, 3:3 + number], reals[:, 3 + number:] = np.nan, -1, -np.inf
        there = [at for at, token in enumerate(tokens) if token >= 0]
        raw = logits[live].float().cpu()
        found = token_logprobs(raw, processed, there, [tokens[at] for at in there], [number] * len(there))
        for at, score in zip(there, found):
            row, best = live[at], list(score.top.items())
            # What a greedy row samples is certain, its siblings as well: each is what is left where it comes.
            processed_one = 0.0 if processed.rows[at].state.is_greedy else score.processed
            reals[row, :2], out[row, 2] = (score.raw, processed_one), score.rank
            out[row, 3:3 + len(best)] = [token for token, _ in best]
            reals[row, 3 + number:3 + number + len(best)] = [value for _, value in best]
        return torch.from_numpy(out).to(self._tables.device)


def _penalise(x: Tensor, seen: Tensor, reals: NDArray[np.float64]) -> None:
    """`seen` [V]: 2 * (times in the output) + (1 if in the prompt)."""
    repetition, presence, frequency = (
        torch.tensor(reals[column], dtype=torch.float32)
        for column in (columns.REPETITION, columns.PRESENCE, columns.FREQUENCY))
    where = seen.nonzero()[:, 0]
    count, values = (seen[where] >> 1).float(), x[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    x[where] = values - presence * (count > 0) - frequency * count


def _mask(x: Tensor, mask: Tensor) -> None:
    """-inf where a token's bit is not set in mask [words] int32."""
    bits = np.unpackbits(mask.cpu().numpy().astype("<i4").view(np.uint8), bitorder="little")[:len(x)]
    x.masked_fill_((torch.from_numpy(bits) == 0) & ~x.isnan(), -torch.inf)


def _ranked(processed: Processed, row: int) -> list[int]:
    """The tokens that could be sampled at a row, in the order in which they would be, one without the other."""
    state = processed.rows[row].state
    if state.is_greedy:
        logits = processed.logits_of(row).numpy()
        order = np.argsort(-logits, kind="stable")
        best: list[int] = order[logits[order] > -np.inf].tolist()
        return best
    ids, scores = processed.support(row)
    perturbed = scores + gumbel(token_bits(state.seed, processed.rows[row].position, ids))
    ranked: list[int] = ids[np.lexsort((ids, -perturbed))].tolist()
    return ranked
