"""Trained heads draft on the device, as a part of the repeated step, what the host would have drafted with them."""

from __future__ import annotations

import dataclasses
from typing import Any
from weakref import ref

import pytest
import torch

from engine.device.on_device import executor_of
from engine.test_head_storage import PARAMS, PROMPTS, drafts_of
from engine.tiny import tiny_llm, tiny_model
from engine.toy_heads import KnowingHead, shape_of
from paceline import LLM, SamplingParams
from paceline.engine.execute.graphs.head_drafter import HeadDrafter
from paceline.errors import ConfigError
from paceline.kernels.device.lookup import HIGHEST, HeadDraft, head_number
from paceline.models.heads.build import build_head
from paceline.models.heads.interface import Opened
from paceline.speculation.model_drafter import ModelDrafter
from paceline.speculation.spec import HEADS
from speculation.trained_heads import MOST_TOKENS, head_config, random_head, random_tensors

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

    def watched(drafter: HeadDrafter, inputs: Any, tables: Any, drafts: Any, *more: Any) -> None:
        propose(drafter, inputs, tables, drafts, *more)
        for group, (seat, end) in enumerate(zip(inputs.seats.tolist(), inputs.ends.tolist())):
            length = int(tables.lengths[max(seat, 0)])
            if seat >= 0 and length + 8 <= end and drafts.matched[group] == -1:
                text = tuple(tables.texts[seat, :length].tolist())
                found[text] = drafts.tokens[group, :int(drafts.found[group])].tolist()

    monkeypatch.setattr(HeadDrafter, "propose", watched)
    return found


def nobody_on_the_host(*_: Any) -> Any:
    raise AssertionError("the host was asked for a draft")


@pytest.mark.parametrize(("kind", "own"), [*((kind, False) for kind in HEADS), ("medusa", True), ("hydra", True)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_device_drafts_what_the_host_would(kind: str, own: bool, temperature: float, drafted: Drafted,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    head = random_head(kind, model, own=own)
    params = [SamplingParams(max_tokens=18, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(2)]
    wish = {"method": kind, "k": 3, "adaptive": False}
    host, texts = drafts_of(tiny_llm(model, trained={"it": head}, kernels="reference"), wish,
                            PROMPTS[:2], params)
    monkeypatch.setattr(ModelDrafter, "propose", nobody_on_the_host)
    llm = on_device({"it": head})
    outs = llm.generate(PROMPTS[:2], params, speculation=wish)
    assert [out.outputs[0].token_ids for out in outs] == texts
    assert all(out.speculation is not None and out.speculation.drafted > 10 for out in outs)
    common = drafted.keys() & host.keys()
    assert len(common) > 5
    assert all(drafted[text] == host[text][0] for text in common)


def test_a_head_that_sees_a_window_drafts_by_what_is_in_it(drafted: Drafted) -> None:
    """On the host and on the device alike; behind short texts as if it saw everything."""
    model, wish = tiny_model(), {"method": "dspark", "k": 3, "adaptive": False}
    params = [SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.0)] * 2
    found = []
    for window in (None, 24):
        head = random_head("dspark", model)
        head.config = dataclasses.replace(head.config, window=window)
        host, texts = drafts_of(tiny_llm(model, trained={"it": head}, kernels="reference"), wish, PROMPTS[:2], params)
        drafted.clear()
        outs = on_device({"it": head}).generate(PROMPTS[:2], params, speculation=wish)
        assert [out.outputs[0].token_ids for out in outs] == texts
        common = drafted.keys() & host.keys()
        assert len(common) > 5 and all(drafted[text] == host[text][0] for text in common)
        found.append(host)
    same = {text: found[1][text][0] == tokens for text, (tokens, *_) in found[0].items() if text in found[1]}
    assert all(same[text] for text in same if len(text) + 8 <= 24)
    assert not all(same[text] for text in same if len(text) > 24)


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


class Failing:
    """A head that raises from some call of one of its methods on, that in which it is tried out included."""

    def __init__(self, head: Any, method: str, after: int) -> None:
        self._head, self._method, self._left = head, method, after

    def __getattr__(self, name: str) -> Any:
        if name != self._method:
            return getattr(self._head, name)
        return self._called

    def _called(self, *given: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the head is broken")
        return getattr(self._head, self._method)(*given)


@pytest.mark.parametrize("kernels", ["stepped", "reference"])
@pytest.mark.parametrize("method,after", [("open", 1), ("open", 3), ("store", 1), ("store", 4)])
def test_a_head_that_fails_in_a_step_is_lost_and_nothing_else(method: str, after: int, kernels: str,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    plain = [out.outputs[0].token_ids for out in tiny_llm(model).generate(PROMPTS, PARAMS, speculation=None)]
    trained = {"bad": Failing(random_head("eagle3", model), method, after), "good": random_head("medusa", model)}
    llm = on_device(trained) if kernels == "stepped" else tiny_llm(model, trained=trained, kernels=kernels)
    bad, good = ({"method": kind, "k": 3, "adaptive": False} for kind in ("eagle3", "medusa"))
    for _ in range(2):
        outs = llm.generate(PROMPTS, PARAMS, speculation=[bad, good, None, "ngram"])
        assert [out.outputs[0].token_ids for out in outs] == plain
        told = [out.speculation for out in outs]
        assert told[0] is not None and "the head is broken" in str(told[0].failure)
        assert told[1] is not None and told[1].failure is None and told[1].drafted > 10
    assert llm.engine.cache.usage().used == 0 and llm.engine.report()["drafter_failures"] == 2
    if method == "store" or kernels == "stepped":
        assert sum("the trained head bad failed" in line for line in caplog.messages) == 1


def test_who_lost_its_head_goes_on_without_rows_for_drafts() -> None:
    llm = on_device({"bad": Failing(random_head("eagle3", tiny_model()), "open", 1)})
    executor, rows = executor_of(llm), []
    submit = executor.submit

    def noted(step: Any) -> None:
        submit(step)
        rows.append(step.drafted_rows)

    executor.submit = noted
    llm.generate(PROMPTS[:2], PARAMS[:2], speculation={"method": "eagle3", "k": 3, "adaptive": False})
    assert any(rows) and not any(rows[-2:])


@pytest.mark.parametrize("kernels", ["stepped", "reference"])
@pytest.mark.parametrize("method", ["open", "store"])
def test_a_head_that_cannot_run_is_refused_by_name(method: str, kernels: str) -> None:
    model = tiny_model()
    trained = {"good": random_head("dspark", model), "bad one": Failing(random_head("eagle3", model), method, 0)}
    with pytest.raises(ConfigError, match=r"'bad one' cannot run .*the head is broken"):
        tiny_llm(model, trained=trained, kernels=kernels)


class Noting:
    """A head that notes what its rounds are opened with, and may be too sure of itself."""

    def __init__(self, head: Any, confidence: float | None = None) -> None:
        self._head, self._confidence = head, confidence
        self.opened: list[Opened] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def open(self, opened: Opened, planes: Any, kernels: Any) -> Any:
        self.opened.append(opened)
        found = self._head.open(opened, planes, kernels)
        if self._confidence is not None:
            logits = found.logits
            found.logits = lambda previous: (logits(previous)[0], torch.full((len(previous),), self._confidence))
        return found


@pytest.mark.parametrize("wanted,depth", [((2,), 2), ((4, 1), 5), ((12, 3), 15)])
def test_a_head_runs_no_more_passes_than_somebody_wants(wanted: tuple[int, ...], depth: int) -> None:
    head = Noting(random_head("eagle3", tiny_model()))
    llm = on_device({"it": head}, repeat=3)
    executor, reached = executor_of(llm), []
    submit = executor.submit

    def noted(step: Any) -> None:
        submit(step)
        reached.extend((group.end - group.start) / step.repeat for group in step.groups if step.drafted_rows)

    executor.submit = noted
    head.opened.clear()
    outs = llm.generate(PROMPTS[:len(wanted)], PARAMS[0], speculation=[
        {"method": "eagle3", "k": k, "adaptive": False} for k in wanted])
    assert all(out.speculation is not None and out.speculation.drafted > 10 for out in outs)
    most = max(len(opened.passes) for opened in head.opened)
    assert most == max(opened.depth for opened in head.opened) == depth
    assert reached and max(reached) <= 1 + depth


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_drafts_for_no_position_that_it_was_not_made_for(kind: str, drafted: Drafted) -> None:
    model = tiny_model()
    config = dataclasses.replace(head_config(kind, model), max_position_embeddings=54)
    head = Noting(build_head(config, random_tensors(config), model, MOST_TOKENS))
    llm = on_device({"it": head})
    wish = {"method": kind, "k": 3, "adaptive": False}
    plain = tiny_llm(model).generate(PROMPTS[:1], PARAMS[0], speculation=None)
    head.opened.clear()
    outs = llm.generate(PROMPTS[:1], PARAMS[0], speculation=wish)
    assert outs[0].outputs[0].token_ids == plain[0].outputs[0].token_ids and outs[0].speculation is not None
    assert outs[0].speculation.failure is None and outs[0].speculation.drafted > 5
    assert max(int(layout.positions.max()) for opened in head.opened for layout in opened.passes) == 53
    assert all(len(text) + len(draft) <= 54 for text, draft in drafted.items())


def test_nobody_is_surer_than_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    propose = HeadDrafter.propose

    def watched(drafter: HeadDrafter, inputs: Any, tables: Any, drafts: Any, *more: Any) -> None:
        propose(drafter, inputs, tables, drafts, *more)
        levels.extend(drafts.levels[0, :int(drafts.found[0])].tolist())

    monkeypatch.setattr(HeadDrafter, "propose", watched)
    llm = on_device({"it": Noting(random_head("eagle3", tiny_model()), confidence=1.5)})
    llm.generate(PROMPTS[:1], PARAMS[0], speculation={"method": "eagle3", "k": 3})
    assert levels and set(levels) == {HIGHEST}


def test_what_a_round_holds_goes_with_its_last_step() -> None:
    class Weak(Noting):
        def open(self, *given: Any) -> Any:
            found = super().open(*given)
            rounds.append(ref(found))
            return found

    rounds: list[ref[Any]] = []
    llm = tiny_llm(tiny_model(), trained={"it": Weak(random_head("eagle3", tiny_model()))}, kernels="reference")
    llm.engine.add(PROMPTS[1], PARAMS[0], speculation={"method": "eagle3", "k": 3, "adaptive": False})
    for _ in range(5):
        llm.engine.step()
    assert len(rounds) > 2 and not any(weak() is not None for weak in rounds)


def test_a_word_of_the_table_names_the_head() -> None:
    word = HeadDraft(3).packed(7, always=True)
    assert head_number(word) == 3 and word >> 16 & 255 == 7 and word & 255 == word >> 8 & 255 == 0
    assert head_number(torch.tensor([word, 2 + 256 * 4 + (5 << 16), 0])).tolist() == [3, 0, 0]
