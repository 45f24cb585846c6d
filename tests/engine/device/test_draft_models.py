"""Models that draft sample on the device what they would sample on the host; what the device cannot sample the host
does."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from engine.device.on_device import full, made, on_host
from engine.device.test_drafted_steps import GREEDY, OTHER, PROMPT, SEEDED
from paceline import SamplingParams
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
        self.llm = made(repeat=1)
        self.drafts: list[DraftTree | None] = []
        self.sampled = Counter[str]()
        propose, sample = ModelDrafter.propose, DeviceDraftSampler.sample

        def proposed(drafter: ModelDrafter, *given: Any) -> list[DraftTree | None]:
            found = propose(drafter, *given)
            self.drafts += found
            return found

        def sampled(*given: Any) -> Any:
            self.sampled["device"] += 1
            return sample(*given)

        monkeypatch.setattr(ModelDrafter, "propose", proposed)
        monkeypatch.setattr(DeviceDraftSampler, "sample", sampled)
        if not on_device:
            monkeypatch.setattr(DeviceDraftSampler, "takes", lambda *_: False)

    def texts(self, wish: dict[str, Any], controls: dict[str, Any]) -> list[list[int]]:
        outs = self.llm.generate([PROMPT, OTHER], params_of(controls), speculation=[wish, wish])
        assert all(out.error is None and out.speculation is not None and out.speculation.failure is None
                   for out in outs)
        return [out.outputs[0].token_ids for out in outs]


def params_of(controls: dict[str, Any]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=count, ignore_eos=True, **controls) for count in (3, 4)]


def plain(controls: dict[str, Any]) -> list[list[int]]:
    """Without speculation, on the reference's kernels."""
    outs = on_host().generate([PROMPT, OTHER], params_of(controls), speculation=None)
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize(("wish", "controls"), [
    (CHAIN, GREEDY), (TREE, SEEDED), (TREE, GREEDY), (CHAIN, SEEDED), (CHAIN, UNTRUNCATED),
    (TREE | {"branches": 5}, UNTRUNCATED), (CHAIN | {"min_confidence": 0.005}, SEEDED),
    (TREE | {"branches": [3, 1, 2]}, GREEDY), ({"method": "skip", "skip": [1], "k": 3, "adaptive": False}, SEEDED)])
def test_the_device_drafts_what_the_host_would(wish: dict[str, Any], controls: dict[str, Any]) -> None:
    found = []
    for on_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, on_device)
            texts = watched.texts(wish, controls)
            found.append((texts, watched.drafts))
            assert bool(watched.sampled["device"]) == on_device
    (texts, drafts), (again, sampled) = found
    assert again == texts == plain(controls) and len(sampled) == len(drafts) >= 2
    for ours, theirs in zip(sampled, drafts):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
            assert ours.scores == pytest.approx(theirs.scores, rel=1e-4)


@pytest.mark.parametrize(("wish", "controls"), [
    (CHAIN, SEEDED | {"repetition_penalty": 1.3}), (CHAIN, GREEDY | {"no_repeat_ngram_size": 2}),
    (CHAIN | {"verify": "rejection"}, SEEDED), (CHAIN, SEEDED | {"trace": True})])
def test_what_the_device_cannot_sample_is_the_hosts(monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any],
                                                    controls: dict[str, Any]) -> None:
    watched = Watched(monkeypatch, on_device=True)
    texts = watched.texts(wish, controls)
    assert watched.drafts and not watched.sampled
    assert texts == plain(controls) or wish.get("verify") == "rejection", "which keeps the distribution only"


@pytest.mark.parametrize("controls", [GREEDY, SEEDED])
def test_a_model_with_a_cache_of_its_own_samples_for_its_targets_seats(controls: dict[str, Any]) -> None:
    wish = {"method": "draft", "model": "own", "k": 2, "adaptive": False}
    found = []
    for on_device in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, on_device)
            engine = watched.llm.engine
            engine.draft_models.add("own", LoadedModel(engine.model, None, engine.kernels))
            # Somebody without a drafter takes the first seat, so that the two caches number theirs differently.
            other = engine.add(OTHER, SamplingParams(max_tokens=30, ignore_eos=True, **GREEDY), speculation=None)
            engine.step()
            texts = watched.texts(wish, controls)
            engine.cancel(other)
            found.append((texts, [draft and draft.tokens for draft in watched.drafts], bool(watched.sampled)))
    assert found[0][:2] == found[1][:2] and [sampled for *_, sampled in found] == [False, True]
    assert any(found[1][1]) and found[1][0] == plain(controls)


def test_what_was_captured_for_a_model_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, on_device=True)
    buffers: list[weakref.ref[Any]] = []
    made_one = LogitsBuffer.__init__

    def noted(buffer: LogitsBuffer, *given: Any) -> None:
        made_one(buffer, *given)
        buffers.append(weakref.ref(buffer))

    monkeypatch.setattr(LogitsBuffer, "__init__", noted)
    watched.texts(CHAIN, GREEDY)
    gc.collect()
    first = sum(one() is not None for one in buffers)
    watched.texts(CHAIN, GREEDY)
    gc.collect()
    assert watched.sampled["device"] >= 2 and len(buffers) > first, "the second model has its own"
    assert sum(one() is not None for one in buffers) == first, "the target's"


def test_without_memory_for_its_samples_the_host_samples(monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(monkeypatch, on_device=True)
    monkeypatch.setattr(DeviceDraftSampler, "sample", full)
    assert watched.texts(CHAIN, GREEDY) == plain(GREEDY)
    assert any(draft is not None for draft in watched.drafts)
    assert "no memory to capture what draft models sample: the host samples it" in caplog.text


def test_logits_are_kept_as_they_are_whatever_torch_makes_by_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        buffers = LogitsBuffers(7, 1, torch.device("cpu"))
        kept = [buffers.of(rows) for rows in (2, 5, 3)]
        assert [one.logits.dtype for one in kept] == [torch.float32] * 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert buffers.of(3).logits.data_ptr() == buffers.of(5).logits.data_ptr() != buffers.of(2).logits.data_ptr()
