"""The comparison of latent and grouped-query attention: same size, the cache as the formula says, a row a case."""

from __future__ import annotations

import torch

from latent_speed import run
from paceline.bench.report import table


def test_both_models_are_of_one_size_and_the_cache_follows_the_formula():
    before = torch.get_num_threads()
    try:
        result = run(layers=1, contexts=(20,), batch=2, repeats=1)
    finally:
        torch.set_num_threads(before)
    weights, cache, *steps = result["rows"]
    assert abs(weights["paceline"] / weights["peers"]["gqa"] - 1) < 0.01
    assert cache["paceline"] == (256 + 32) * 4 and cache["peers"]["gqa"] == 2 * 8 * 64 * 4
    assert f"= {(256 + 32) * 4}" in cache["note"]
    assert [step["case"] for step in steps] == [
        "decode, 1 x 20 tokens before", "decode, 2 x 20 tokens before", "prompt chunk of 256, 1 x 20 tokens before"]
    assert all(step["paceline"] > 0 and step["peers"]["gqa"] > 0 for step in steps)
    assert "3.56x" in table(result)
