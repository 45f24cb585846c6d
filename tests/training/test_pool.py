"""Batches: as large as they are computed, none of them a scrap, and anchors as the answers are long."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.training.pool import Pool, anchor_count
from paceline.training.shards import Text


def padded(length: int) -> int:
    return -(-max(160, length) // 32) * 32


def texts(lengths: list[int], prompt: int = 10) -> list[Text]:
    return [Text(place, np.zeros(length, np.int32), prompt) for place, length in enumerate(lengths)]


def plan(lengths: list[int], batch_tokens: int) -> list[list[Text]]:
    """All texts once."""
    pool = Pool(0, batch_tokens, padded)
    pool.add(texts(lengths))
    batches: list[list[Text]] = []
    while sum(map(len, batches)) < len(lengths):
        batches.append(pool.next())
    assert sorted(text.index for batch in batches for text in batch) == list(range(len(lengths)))
    return batches


def test_a_batch_is_as_large_as_it_is_computed() -> None:
    lengths = np.random.default_rng(0).integers(12, 700, 3000).tolist()
    for batch in plan(lengths, 8192):
        assert len(batch) * padded(max(len(text.tokens) for text in batch)) <= 8192
    assert {len(batch) for batch in plan([20] * 102, 8192)} == {51}  # 160 tokens each, however short they are


def test_no_batch_is_a_scrap() -> None:
    assert sorted(map(len, plan([20] * 52, 8192))) == [26, 26]
    # Long texts are last: as many go there as there is room for.
    found = sorted((max(len(text.tokens) for text in batch), len(batch)) for batch in plan([20] * 51 + [700] * 2, 8192))
    assert found == [(20, 42), (700, 11)]
    assert min(map(len, plan([150] * 2050, 8192))) > 20  # a window of two texts would be a batch of two


def test_anchors_follow_the_answers() -> None:
    assert anchor_count(texts([110, 130]), 64) == 50  # .45 of 110
    assert anchor_count(texts([500, 500]), 64) == 64
    assert anchor_count(texts([12, 12]), 64) == 1
    assert anchor_count(texts([12, 14, 13]), 64) == 1 and anchor_count(texts([110, 130]), 7) == 7


def test_texts_that_are_gone_are_said() -> None:
    pool = Pool(0, 8192, padded)
    pool.add(texts([20] * 9))
    pool.next()
    other = Pool(0, 8192, padded)
    with pytest.raises(ConfigError, match=r"learned from 9 texts.*holds 0"):
        other.restore(pool.state())
    other.add(texts([20] * 12))
    other.restore(pool.state())
    assert other.seen.tolist() == [1] * 9 + [0] * 3
