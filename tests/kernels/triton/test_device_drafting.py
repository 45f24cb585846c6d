"""Models that draft draw on the device what they would draw on the host; what the device cannot draw the host does."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.triton.test_device_decoding import made
from kernels.triton.test_drafted_steps import GREEDY, OTHER, PROMPT, SEEDED
from paceline import LLM, SamplingParams
from paceline.engine.drafting.device_sampler import DeviceDraftSampler
from paceline.engine.drafting.models import LoadedModel
from paceline.engine.execute.graphs.logits_buffer import LogitsBuffer, LogitsBuffers
from paceline.speculation.model_drafter import ModelDrafter
from paceline.speculation.tree import DraftTree

CHAIN: dict[str, Any] = {"method": "exit", "layers": 1, "k": 2, "adaptive": False}
TREE: dict[str, Any] = {"method": "exit", "layers": 1, "branches": [2, 2], "adaptive": False}
UNTRUNCATED = {"temperature": 1.2, "seed": 7}


class Watched:
    """An engine whose drafts are kept."""

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
        self.llm: LLM = made(device, "triton", repeat=1)
        self.drafts: list[DraftTree | None] = []
        self.drawn = Counter[str]()
        propose, draws = ModelDrafter.propose, DeviceDraftSampler.sample

        def proposed(drafter: ModelDrafter, *given: Any) -> list[DraftTree | None]:
            found = propose(drafter, *given)
            self.drafts += found
            return found

        def drawn(*given: Any) -> Any:
            self.drawn["device"] += 1
            return draws(*given)

        monkeypatch.setattr(ModelDrafter, "propose", proposed)
        monkeypatch.setattr(DeviceDraftSampler, "sample", drawn)
        if not on_device:
            monkeypatch.setattr(DeviceDraftSampler, "takes", lambda *_: False)

    def texts(self, wish: dict[str, Any], controls: dict[str, Any]) -> list[list[int]]:
        outs = self.llm.generate([PROMPT, OTHER], params_of(controls), speculation=[wish, wish])
        assert all(out.error is None and out.speculation.failure is None for out in outs)
        return [out.outputs[0].token_ids for out in outs]


def params_of(controls: dict[str, Any]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=count, ignore_eos=True, **controls) for count in (3, 4)]


def plain(device: torch.device, controls: dict[str, Any]) -> list[list[int]]:
    """Without speculation, on the reference's kernels."""
    outs = made(device, "reference").generate([PROMPT, OTHER], params_of(controls), speculation=None)
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize(("wish", "controls"), [
    (CHAIN, GREEDY), (TREE, SEEDED), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (TREE, GREEDY), (CHAIN, SEEDED), (CHAIN, UNTRUNCATED), (TREE | {"branches": 5}, UNTRUNCATED),
        (CHAIN | {"min_confidence": 0.005}, SEEDED), (TREE | {"branches": [3, 1, 2]}, GREEDY),
        ({"method": "skip", "skip": [1], "k": 3, "adaptive": False}, SEEDED)))])
def test_the_device_drafts_what_the_host_would(device: torch.device, wish: dict[str, Any],
                                               controls: dict[str, Any]) -> None:
    found = []
    for on_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(device, patch, on_device)
            texts = watched.texts(wish, controls)
            found.append((texts, watched.drafts))
            assert bool(watched.drawn["device"]) == on_device
    (texts, drafts), (again, drawn) = found
    assert again == texts == plain(device, controls) and len(drawn) == len(drafts) >= 2
    for ours, theirs in zip(drawn, drafts):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
            assert ours.scores == pytest.approx(theirs.scores, rel=1e-4)


@pytest.mark.parametrize(("wish", "controls"), [
    (CHAIN, SEEDED | {"repetition_penalty": 1.3}),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (CHAIN, GREEDY | {"no_repeat_ngram_size": 2}), (CHAIN | {"verify": "rejection"}, SEEDED),
        (CHAIN, SEEDED | {"trace": True})))])
def test_what_the_device_cannot_draw_is_the_hosts(device: torch.device, monkeypatch: pytest.MonkeyPatch,
                                                  wish: dict[str, Any], controls: dict[str, Any]) -> None:
    watched = Watched(device, monkeypatch, on_device=True)
    texts = watched.texts(wish, controls)
    assert watched.drafts and not watched.drawn
    assert texts == plain(device, controls) or wish.get("verify") == "rejection", "which keeps the distribution only"


@pytest.mark.full
@pytest.mark.parametrize("controls", [GREEDY, SEEDED])
def test_a_model_with_a_cache_of_its_own_draws_for_its_targets_seats(device: torch.device,
                                                                     controls: dict[str, Any]) -> None:
    wish = {"method": "draft", "model": "own", "k": 2, "adaptive": False}
    found = []
    for on_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(device, patch, on_device)
            engine = watched.llm.engine
            engine.draft_models.add("own", LoadedModel(engine.model, None, engine.kernels))
            # Somebody without a drafter takes the first seat, so that the two caches number theirs differently.
            other = engine.add(OTHER, SamplingParams(max_tokens=30, ignore_eos=True, **GREEDY), speculation=None)
            engine.step()
            texts = watched.texts(wish, controls)
            engine.cancel(other)
            found.append((texts, [draft and draft.tokens for draft in watched.drafts], bool(watched.drawn)))
    assert found[0][:2] == found[1][:2] and [drawn for *_, drawn in found] == [False, True]
    assert any(found[1][1]) and found[1][0] == plain(device, controls)


def test_what_was_captured_for_a_model_goes_with_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(device, monkeypatch, on_device=True)
    handovers: list[weakref.ref[Any]] = []
    made_one = LogitsBuffer.__init__

    def noted(logits_buffer: LogitsBuffer, *given: Any) -> None:
        made_one(logits_buffer, *given)
        handovers.append(weakref.ref(logits_buffer))

    monkeypatch.setattr(LogitsBuffer, "__init__", noted)
    watched.texts(CHAIN, GREEDY)
    gc.collect()
    first = sum(one() is not None for one in handovers)
    watched.texts(CHAIN, GREEDY)
    gc.collect()
    assert watched.drawn["device"] >= 2 and len(handovers) > first, "the second model has its own"
    assert sum(one() is not None for one in handovers) == first, "the target's"


def test_without_memory_for_its_draws_the_host_draws(device: torch.device, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(device, monkeypatch, on_device=True)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DeviceDraftSampler, "sample", full)
    watched.texts(CHAIN, GREEDY)
    assert any(draft is not None for draft in watched.drafts)
    assert "the sampling of a draft model" in caplog.text


def test_logits_are_kept_as_they_are_whatever_torch_makes_by_default(device: torch.device) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        handovers = LogitsBuffers(7, 1, device)
        assert [handovers.of(rows).logits.dtype for rows in (2, 5, 3)] == [torch.float32] * 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert handovers.of(3).logits.data_ptr() == handovers.of(5).logits.data_ptr() != handovers.of(2).logits.data_ptr()
