"""Adapters of a model that several ranks hold: each has its part, and a text is what one rank says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.adapter_files import factors, shapes_of, write_adapter
from adapters.test_equality import TARGETS, UNTIED
from engine.test_equality_matrix import PROMPT, STYLES
from engine.tiny import record, tiny_llm, tiny_model
from paceline import LLM, SamplingParams
from parallel.ranks import shared_model

WHO = [None, "one", "two", "three"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, **STYLES["seeded"])


def said(llm: LLM, folder: Path, whole: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """What every adapter says in one batch, one of which is loaded after another has gone, and the logits of it."""
    for name, targets in TARGETS.items():
        tensors = factors(shapes_of(whole, targets), name)
        llm.load_adapter(name, str(write_adapter(folder / name, tensors, target_modules=targets)))
    llm.unload_adapter("two")
    llm.load_adapter("two", str(folder / "two"))
    pipeline = record(llm)
    outs = llm.generate([PROMPT[:9 + place] for place in range(len(WHO))], PARAMS, adapter=WHO)
    assert all(out.error is None for out in outs)
    return ([out.outputs[0].token_ids for out in outs],
            [logits for _, logits in sorted(pipeline.seen.items(), key=lambda item: item[0])])


@pytest.mark.parametrize(("name", "size", "exact"), [("llama", 2, True), ("llama", 2, False), ("qwen2", 4, True),
                                                     ("olmo2", 2, True)])
def test_adapters_are_split(name: str, size: int, exact: bool, tmp_path: Path) -> None:
    whole = tiny_model(name, **UNTIED)
    deterministic = {"deterministic": exact}
    want, logits = said(tiny_llm(whole, **deterministic), tmp_path / "whole", whole)
    shared = shared_model(name, size, exact, **UNTIED)
    got, ours = said(tiny_llm(shared, **deterministic), tmp_path / "shared", whole)
    assert got == want
    assert len({tuple(tokens) for tokens in got}) == len(WHO), "each should make a difference"
    assert len(ours) == len(logits)
    for left, right in zip(ours, logits):
        torch.testing.assert_close(left, right, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}))


def test_ranks_whose_slots_are_others_end(tmp_path: Path) -> None:
    """Interrupted between its own part and the others', rank 0 would have rows computed with another adapter."""
    llm = tiny_llm(shared_model("llama", **UNTIED), deterministic=True)
    whole = tiny_model("llama", **UNTIED)
    tensors = factors(shapes_of(whole, TARGETS["one"]), "one")
    folder = str(write_adapter(tmp_path, tensors, target_modules=TARGETS["one"]))
    llm.engine.adapters.slots.load({})  # and nobody was told
    llm.load_adapter("one", folder)
    [out] = llm.generate([PROMPT], PARAMS, adapter="one")
    assert "is in slot 1 of rank 0 and in slot 0 here" in str(out.error)
