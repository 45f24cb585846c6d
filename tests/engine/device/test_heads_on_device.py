"""Trained heads draft on the device, as a part of the repeated step, what the host would have drafted with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device.on_device import executor_of
from engine.test_head_storage import PARAMS, PROMPTS, drafts_of
from engine.tiny import tiny_llm, tiny_model
from engine.toy_heads import KnowingHead, shape_of
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.head_drafter import HeadDrafter
from paceline.kernels.device.lookup import HeadDraft, head_number
from paceline.speculation.model_drafter import ModelDrafter
from paceline.speculation.spec import HEADS
from speculation.trained_heads import random_head

Drafted = dict[tuple[int, ...], list[int]]


def on_device(trained: dict[str, Any], repeat: int = 4, **options: Any) -> LLM:
    llm = tiny_llm(tiny_model(), trained=trained, kernels="stepped", **options)
    executor_of(llm).how_often = lambda *_: repeat
    executor_of(llm)._attended.goes_apart = lambda *_: False
    return llm


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """What heads propose on the device after each text, where a whole block has room."""
    found: Drafted = {}
    propose = HeadDrafter.propose

    def watched(drafter: HeadDrafter, inputs: Any, tables: Any, drafts: Any, controls: Any) -> None:
        propose(drafter, inputs, tables, drafts, controls)
        for group, (seat, end) in enumerate(zip(inputs.seats.tolist(), inputs.ends.tolist())):
            length = int(tables.lengths[max(seat, 0)])
            if seat >= 0 and length + 8 <= end and drafts.matched[group] == -1:
                text = tuple(tables.texts[seat, :length].tolist())
                found[text] = drafts.tokens[group, :int(drafts.found[group])].tolist()

    monkeypatch.setattr(HeadDrafter, "propose", watched)
    return found


def nobody_on_the_host(*_: Any) -> Any:
    raise AssertionError("the host was asked for a draft")


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_device_drafts_what_the_host_would(kind: str, temperature: float, drafted: Drafted,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    params = [SamplingParams(max_tokens=18, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(2)]
    wish = {"method": kind, "k": 3, "adaptive": False}
    host, texts = drafts_of(tiny_llm(model, trained={"it": random_head(kind, model)}, kernels="reference"), wish,
                            PROMPTS[:2], params)
    monkeypatch.setattr(ModelDrafter, "propose", nobody_on_the_host)
    llm = on_device({"it": random_head(kind, model)})
    outs = llm.generate(PROMPTS[:2], params, speculation=wish)
    assert [out.outputs[0].token_ids for out in outs] == texts
    assert all(out.speculation is not None and out.speculation.drafted > 10 for out in outs)
    common = drafted.keys() & host.keys()
    assert len(common) > 5
    assert all(drafted[text] == host[text][0] for text in common)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_right_drafts_are_accepted_in_mixed_company(kind: str, adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that knows the texts, another kind of head, look-ups and plain decoding in the same steps; twice."""
    model = tiny_model()
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, PARAMS, speculation=None)]
    known = KnowingHead(shape_of(kind, model), [prompt + text for prompt, text in zip(PROMPTS, plain)])
    other = random_head("medusa", model)
    monkeypatch.setattr(ModelDrafter, "propose", nobody_on_the_host)
    llm = on_device({"known": known, "medusa": other})
    wish = {"method": kind, "k": 4, "adaptive": adaptive}
    for wishes in ([wish] * 4, [wish, {"method": "medusa", "k": 2, "adaptive": False}, "ngram", None],
                   [wish, wish, None, wish]):
        outs = llm.generate(PROMPTS, PARAMS, speculation=wishes)
        assert [out.outputs[0].token_ids for out in outs] == plain
        if not adaptive:
            assert outs[0].speculation is not None and outs[0].speculation.mean_accepted_length > 3


def test_what_the_device_cannot_do_the_host_does() -> None:
    """Siblings, a threshold, other rules, masks and scores."""
    model = tiny_model()
    llm = on_device({"it": random_head("dspark", model)})
    greedy = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=2)
    for more, params in (({"branches": 2}, greedy), ({"min_confidence": 0.2}, greedy),
                         ({"verify": "rejection"}, sampled),
                         ({}, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, no_repeat_ngram_size=2)),
                         ({}, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=1))):
        wish = {"method": "dspark", "k": 3, "adaptive": False} | more
        out = llm.generate([PROMPTS[0]], params, speculation=wish)[0]
        assert out.speculation is not None and out.speculation.failure is None and out.speculation.cycles
        if "verify" not in more:
            plain = tiny_llm(model).generate([PROMPTS[0]], params, speculation=None)[0]
            assert out.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_word_of_the_table_names_the_head() -> None:
    word = HeadDraft(3).packed(7, always=True)
    assert head_number(word) == 3 and word >> 16 & 255 == 7 and word & 255 == word >> 8 & 255 == 0
    assert head_number(torch.tensor([word, 2 + 256 * 4 + (5 << 16), 0])).tolist() == [3, 0, 0]
