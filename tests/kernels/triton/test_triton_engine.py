"""Whole engines on the Triton kernels, a few tokens each: prompts and repeated steps, drafts in a tree that are
verified there, penalties. What an engine promises on a device is tested in tests/engine/device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.adapter_files import ATTENTION, MLP, factors, shapes_of, write_adapter
from engine.device.on_device import HEAVY, SEEDED, alone_on_device, same
from engine.tiny import BASE, SHAPES, RandomWeights
from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.request import RequestOutput
from speculation.trained_heads import random_head

PROMPTS = [[3, 14, 15, 92, 65], [2, 71, 82]]
GREEDY: dict[str, Any] = {"temperature": 0.0}


class OnDevice(RandomWeights):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().take(name, shape, dtype).to(self._device)


SUBJECTS = {"plain": ("llama", "auto"), "latents": ("deepseek_dense", "auto"), "fp8": ("llama", "fp8")}
"""A model, and what its cache holds."""


def made(device: torch.device, kernels: str, subject: str, capture: str = "lazy", trained: str = "") -> LLM:
    """One layer of one head, which is enough: what kernels compute is tested elsewhere. `trained`: the kind of a
    trained head of the model."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    name, kv_dtype = SUBJECTS[subject]
    model = build(ModelConfig.from_dict(BASE | SHAPES[name] | small), OnDevice(device), 64)
    options = EngineOptions.of(deterministic=True, kv_blocks=16, block_size=8, max_num_seqs=2, kernels=kernels,
                               kv_dtype=kv_dtype, capture=capture)
    heads = {trained: random_head(trained, model)} if trained else None
    llm = LLM.from_engine(engine_for(model, None, options, device=device, revision="tiny", heads=heads))
    if kernels == "triton" and capture != "never":
        executor: Any = llm.engine.executor
        assert isinstance(executor, GraphExecutor)
        executor.how_often = lambda *_: 2  # the interpreter is so slow that it would always be one
        alone_on_device(llm)
    return llm


def outs(llm: LLM, wishes: list[dict[str, Any]], speculation: Any = None,
         adapter: list[str | None] | None = None) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **wish) for wish in wishes]
    found = llm.generate(PROMPTS, params, speculation=speculation, adapter=adapter)
    assert llm.engine.cache.usage().used == 0
    return found


def expected_of(device: torch.device, subject: str, wishes: list[dict[str, Any]]) -> list[RequestOutput]:
    """The reference's. Of fp8 caches what the same kernels give that are launched one by one: the interpreter does not
    round to float8 as torch does."""
    other = made(device, "triton", subject, "never") if subject == "fp8" else made(device, "reference", subject)
    return outs(other, wishes)


@pytest.mark.parametrize(("subject", "wishes"), [
    ("plain", [GREEDY, SEEDED | {"top_k": 9}]), ("plain", [SEEDED | HEAVY, GREEDY | {"logprobs": 2}]),
    ("latents", [SEEDED, GREEDY]), ("fp8", [SEEDED, GREEDY])], ids=["plain", "penalties and scores", "latents", "fp8"])
def test_prompts_and_repeated_steps(device: torch.device, subject: str, wishes: list[dict[str, Any]]) -> None:
    same(outs(made(device, "triton", subject), wishes), expected_of(device, subject, wishes), 1e-4)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_trained_head_drafts_there(device: torch.device, kind: str) -> None:
    wishes = [SEEDED, GREEDY]
    found = outs(made(device, "triton", "plain", trained=kind), wishes, {"method": kind, "k": 2, "adaptive": False})
    assert all(out.speculation is not None and out.speculation.drafted for out in found)
    same(found, expected_of(device, "plain", wishes), 1e-4)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_drafted_tree_is_verified_there(device: torch.device, subject: str) -> None:
    wishes = [SEEDED, GREEDY]
    expected = expected_of(device, subject, wishes)
    wish = {"method": "oracle", "k": 2, "branches": 2, "adaptive": False, "tokens": expected[0].outputs[0].token_ids}
    found = outs(made(device, "triton", subject), wishes, [wish, None])
    same(found, expected)
    assert found[0].speculation is not None and found[0].speculation.accepted >= 2


def test_adapters(device: torch.device, tmp_path: Path) -> None:
    """In prompts and in repeated steps, beside a request without one."""
    found = []
    for kernels in ("triton", "reference"):
        llm = made(device, kernels, "plain")
        own = factors(shapes_of(llm.engine.model, ATTENTION + MLP), "device")
        llm.load_adapter("own", str(write_adapter(tmp_path / kernels, own)))
        found.append(outs(llm, [GREEDY, GREEDY], adapter=["own", None]))
    same(*found)
    without = outs(made(device, "reference", "plain"), [GREEDY] * 2)
    assert found[0][0].outputs[0].token_ids != without[0].outputs[0].token_ids
