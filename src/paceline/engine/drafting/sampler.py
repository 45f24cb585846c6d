"""DraftSampler: a draft model's logits to drafted tokens, through the pipeline that the target's go through."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.schedule.sequence import Sequence
from paceline.sampling.dense import Floats, Ints, exp_sums, row_max
from paceline.sampling.native import load as native_sampler
from paceline.sampling.noise import DRAFTER, GUMBEL_MAX, PRIVATE_DRAFT, TARGET, gumbel, token_bits
from paceline.sampling.pipeline import Pipeline, Processed, SampleRow
from paceline.speculation.models import NO_SAMPLES, SAMPLED_RULES, Samples

CONTENDERS = 256
"""Siblings of a coupled sample are looked for among so many of the best scores: which they are is no promise."""


@dataclass(slots=True)
class Place:
    """Where to sample: after `path` draft tokens that follow a sequence's last committed one."""

    seq: Sequence
    path: Seq[int]
    count: int

    @property
    def position(self) -> int:
        """Of the token to be sampled."""
        return len(self.seq.tokens) + len(self.path)


class DraftSampler:
    def __init__(self, vocab_size: int) -> None:
        self._pipeline = Pipeline(vocab_size, native_sampler())

    def sample(self, logits: torch.Tensor, places: Seq[Place],
               confidences: Seq[float] | None = None) -> list[Samples]:
        """The Samples of each row of logits [R, V]. Every control of the sequence's request applies, the draft above it
        counted as output. `confidences`: how likely the first token of each is to be accepted, where somebody knows
        better than the logits."""
        rows: list[SampleRow] = []
        lost: set[int] = set()
        for index, place in enumerate(places):
            state, mask = place.seq.state, None
            if state.grammar is not None:
                try:
                    mask = state.grammar.mask(place.path)
                except Exception:  # the target will meet it, and say so, if the text comes this way
                    lost.add(index)
            rows.append(SampleRow(state, place.position, place.path, mask))
        processed = self._pipeline.process(logits, rows)
        lost |= processed.errors.keys() | processed.stopped
        chosen = self._pipeline.choose(processed)
        return [NO_SAMPLES if row in lost else
                _samples(processed, row, place, chosen[row], None if confidences is None else confidences[row])
                for row, place in enumerate(places)]


def _samples(processed: Processed, row: int, place: Place, chosen: int, known: float | None) -> Samples:
    state = place.seq.state
    rule = place.seq.rule
    if rule in SAMPLED_RULES and not state.is_greedy:
        return Samples(_private(processed, row, place, rule), processed.probs(row))
    tokens, agreement = [chosen], None
    if place.count == 1 and known is not None:
        return Samples(tokens, confidences=[known])
    if place.count > 1 and state.is_greedy:
        tokens += _next_best(processed, row, place, chosen)
    elif place.count > 1:
        tokens, agreement = _siblings(processed, row, place, chosen)
    if state.is_greedy:
        # A point mass knows no doubt; the model's own distribution does.
        raw = processed.logits_of(row)[None]
        top = row_max(raw)
        total = exp_sums(raw, np.ones(1, dtype=np.float32), top)[0]
        likely = [float(np.exp(float(raw[0, token]) - float(top[0]))) / float(total) for token in tokens]
    else:
        likely = [float(np.exp(processed.logprob(row, token))) for token in tokens]
    return Samples(tokens, confidences=likely if known is None else [known, *likely[1:]], agreement=agreement)


def _next_best(processed: Processed, row: int, place: Place, chosen: int) -> list[int]:
    scores, order = processed.logits_of(row).topk(min(place.count, processed.logits.shape[1]))
    ranked = [token for token, score in zip(order.tolist(), scores.tolist()) if score > -np.inf]
    return [token for token in ranked if token != chosen][:place.count - 1]


def _siblings(processed: Processed, row: int, place: Place, chosen: int) -> tuple[list[int], list[float]]:
    """`chosen`, then what would have been sampled next with the target's noise had it not been there; and how likely
    the target is to sample each with that noise. Its scores differ from the draft's by an error that nobody knows: as
    if that were noise of the same kind once more, by the softmax of the noisy scores."""
    ids, values = processed.support(row)
    if len(ids) > CONTENDERS:
        best = np.argpartition(values, -CONTENDERS)[-CONTENDERS:]
        ids, values = ids[best], values[best]
    noisy = values + gumbel(token_bits(place.seq.state.seed, place.position, ids, purpose=TARGET))
    weights = np.exp(noisy - noisy.max())
    order = np.lexsort((ids, -noisy))
    chances = dict(zip(ids[order].tolist(), (weights / weights.sum())[order].tolist()))
    tokens = [chosen, *(token for token in chances if token != chosen)][:place.count]
    return tokens, [chances.get(token, 0.0) for token in tokens]


def _private(processed: Processed, row: int, place: Place, rule: str) -> list[int]:
    """Tokens sampled from the row's distribution with noise the target does not use: without replacement the best by
    one noise, else each by a noise of its own."""
    ids, values = processed.support(row)
    if rule == "without-replacement":
        return _ranked(ids, values, place, PRIVATE_DRAFT)[:place.count]
    tokens = [_ranked(ids, values, place, PRIVATE_DRAFT, only=True)[0]]
    return tokens + [_ranked(ids, values, place, DRAFTER, index, only=True)[0] for index in range(1, place.count)]


def _ranked(ids: Ints, scores: Floats, place: Place, purpose: int, level: int = 0,
            only: bool = False) -> list[int]:
    """`ids` by score + noise, best first; `only`: just the best."""
    cycle, seed = len(place.seq.tokens), place.seq.state.seed
    if only and len(ids) > CONTENDERS:
        # No noise lifts a token this far below to where even the least noise leaves the best one.
        near = scores >= scores.max() - 8.0
        bits = token_bits(seed, place.position, ids[near], purpose=purpose, level=level, cycle=cycle)
        reached = float((scores[near] + gumbel(bits)).max())
        possible = scores >= reached - GUMBEL_MAX - 0.1
        ids, scores = ids[possible], scores[possible]
    perturbed = scores + gumbel(token_bits(seed, place.position, ids, purpose=purpose, level=level, cycle=cycle))
    if only:
        return [int(ids[perturbed == perturbed.max()].min())]
    order = np.lexsort((ids, -perturbed))
    ranked: list[int] = ids[order].tolist()
    return ranked
