"""`python tools/draft_steps.py`, its ways of measuring on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

import draft_steps
from engine.tiny import tiny_llm
from paceline import SamplingParams
from paceline.errors import ConfigError

GREEDY = {"temperature": 0.0}
PROMPTS = [[3, 14, 15, 92, 65]]


@pytest.mark.parametrize("way", [draft_steps.scripted, draft_steps.by_model])
def test_both_ways_are_measured_on_equal_texts(monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    monkeypatch.setattr(draft_steps, "SHORT", 2)
    llm: Any = tiny_llm(kernels="stepped")
    params = SamplingParams(max_tokens=6, ignore_eos=True, **GREEDY)
    texts = [out.outputs[0].token_ids for out in llm.generate(PROMPTS[:1], params, speculation=None)]
    model = llm.engine.draft_models.exiting(1)
    sampler = model.device_sampler
    found = way(llm, PROMPTS[:1], texts, {"k": 2}, GREEDY)
    assert len(found) == 2 and next(iter(found)) == "captured"
    assert all(times["equal"] == 1 and "draft_s" in times for times in found.values())
    assert model.device_sampler is sampler, "the engine is as it was"
    assert "takes" not in vars(llm.engine.executor.graphs.verify)


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ConfigError, match="No part 'scipted': use scripted, models or both"):
        draft_steps.run("smollm2-135m", "bfloat16", False, (1,), 8, ("scipted",))
