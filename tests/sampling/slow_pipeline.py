"""The pipeline once more, one row and one token at a time: slow, and meant to be obviously right."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from paceline.request import SamplingParams
from paceline.sampling.noise import gumbel, token_bits

f32 = np.float32
BIG = np.finfo(f32).max


def edited(logits: np.ndarray, p: SamplingParams, prompt: list[int], output: list[int], eos: list[int],
           bad_words: list[tuple[int, ...]], mask=None, masks: bool = True) -> np.ndarray:
    x = logits.astype(f32).copy()
    counts = Counter(output)
    text = prompt + output
    for token in sorted(set(text)):
        if p.repetition_penalty != 1.0:
            x[token] = x[token] / f32(p.repetition_penalty) if x[token] > 0 else x[token] * f32(p.repetition_penalty)
        if counts[token]:
            x[token] -= f32(p.presence_penalty)
            x[token] -= f32(p.frequency_penalty) * f32(counts[token])
    for token, bias in (p.logit_bias or {}).items():
        x[token] += f32(min(bias, BIG))
    if masks:
        for word in bad_words:
            start = list(word[:-1])
            if not start or text[-len(start):] == start:
                x[word[-1]] = -np.inf
        n = p.no_repeat_ngram_size
        if n:
            grams = {tuple(text[i:i + n]) for i in range(len(text) - n + 1)}
            for token in range(len(x)):
                if len(text) >= n - 1 and (*text[len(text) - n + 1:], token) in grams:
                    x[token] = -np.inf
        if p.allowed_token_ids is not None:
            for token in range(len(x)):
                if token not in p.allowed_token_ids:
                    x[token] = -np.inf
        if mask is not None:
            x[~np.asarray(mask)] = -np.inf
    if len(output) < p.min_tokens:
        for token in [*(() if p.ignore_eos else eos), *p.stop_token_ids]:
            x[token] = -np.inf
    return x


def support(x: np.ndarray, p: SamplingParams) -> dict[int, np.float32]:
    """Scores of the tokens that remain, best first, ties to the lowest id. Empty when nothing does."""
    if p.temperature < 1e-10:
        alive = [t for t in range(len(x)) if x[t] > -np.inf]
        return {t: x[t] for t in sorted(alive, key=lambda t: (-x[t], t))[:1]}
    with np.errstate(over="ignore"):
        scores = {t: f32(x[t]) / f32(min(p.temperature, BIG)) for t in range(len(x)) if x[t] > -np.inf}
    scores = {t: min(max(s, -BIG), BIG) for t, s in scores.items()}
    if not scores:
        return {}
    order = sorted(scores, key=lambda t: (-scores[t], t))
    if p.top_k:
        order = order[:p.top_k]
    best = scores[order[0]]
    if p.top_p < 1.0:
        weights = [float(torch.exp(torch.tensor([scores[t] - best]))[0]) for t in order]
        target = p.top_p * math.fsum(weights)
        kept, mass = 0, 0.0
        while kept < len(order) and mass < target:
            mass += weights[kept]
            kept += 1
        order = order[:kept]
    if p.min_p > 0.0:
        order = [t for t in order if float(scores[t]) >= float(best) + math.log(p.min_p)]
    return {t: scores[t] for t in order}


def choose(scores: dict[int, np.float32], p: SamplingParams, seed: int, position: int) -> int:
    best, winner = -math.inf, -1
    ids = sorted(scores)
    noise = gumbel(token_bits(seed, position, ids)) if ids else []
    for token, g in zip(ids, noise):
        value = f32(scores[token] + (f32(0) if p.temperature < 1e-10 else g))
        if value > best:
            best, winner = value, token
    return winner
