"""The draft vocabulary: the tokens that come most often, ascending, and what share of all tokens they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.training.shards import Text

PROMPT_WEIGHT = 0.05
"""Of a token in a prompt beside one in an answer: answers take up what was asked, sooner or later."""


def counts(texts: Iterable[Text], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each token comes in answers, and in prompts."""
    texts = list(texts)
    answers, prompts = (np.bincount(np.concatenate(parts), minlength=vocab_size) for parts in (
        [text.tokens[text.prompt:] for text in texts], [text.tokens[:text.prompt] for text in texts]))
    return answers, prompts


def choose(texts: Iterable[Text], vocab_size: int, size: int) -> np.ndarray:
    """[size] int64, ascending: the target's id of each draft id."""
    answers, prompts = counts(texts, vocab_size)
    order = np.argsort(-(answers + PROMPT_WEIGHT * prompts), kind="stable")  # ties: the lower id, the older merge
    return np.sort(order[:size]).astype(np.int64)


def coverage(texts: Iterable[Text], vocab_size: int, ids: np.ndarray) -> float:
    """Share of the answers' tokens that are among these."""
    answers, _ = counts(texts, vocab_size)
    return float(answers[ids].sum() / max(1, answers.sum()))


def spare_token(texts: Iterable[Text], vocab_size: int, candidates: Iterable[int], taken: frozenset[int]) -> int:
    """A token that no text holds, to stand for "not known yet": the last such of the candidates, else of all."""
    answers, prompts = counts(texts, vocab_size)
    unused = set(np.flatnonzero(answers + prompts == 0).tolist()) - taken
    return max(unused & set(candidates), default=max(unused, default=vocab_size - 1))
