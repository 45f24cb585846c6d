"""Several steps between two looks of the host: the same tokens as one by one, whatever ends a text on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.tiny import BASE, SHAPES, RandomWeights
from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.models.config import ModelConfig
from paceline.models.registry import build

PROMPTS = [[3, 14, 15, 92, 65], [2, 71, 82], [81, 8, 2, 84, 59, 4, 5, 23, 5, 3, 60]]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.3, "seed": 8, "top_k": 9, "top_p": 0.9}]


class OnDevice(RandomWeights):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().take(name, shape, dtype).to(self._device)


def made(device: torch.device, kernels: str, repeat: int = 8, name: str = "llama", **more: Any) -> LLM:
    options = {"deterministic": True, "kv_blocks": 40, "block_size": 8, "max_num_seqs": 8, "kernels": kernels} | more
    shape = ModelConfig.from_dict(BASE | SHAPES[name])
    model = build(shape, OnDevice(device), 512)
    llm = LLM.from_engine(engine_for(model, None, EngineOptions.of(**options), device=device, revision="tiny"))
    decoder = llm.engine._device_decoder
    assert (decoder is not None) == (kernels == "triton")
    if decoder is not None:
        decoder.repeats = lambda *_: repeat  # the interpreter is so slow that it would always be one
        if not repeat:
            llm.engine._device_decoder = llm.engine.runner.graphs = None
    return llm


def texts(llm: LLM, params: list[SamplingParams]) -> list[tuple[list[int], str | None]]:
    found = [(out.outputs[0].token_ids, out.outputs[0].finish_reason) for out in llm.generate(PROMPTS, params)]
    assert llm.engine.cache.usage().used == 0, "nobody holds blocks"
    return found


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_bursts_draw_what_single_steps_draw(device: torch.device, name: str) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for wish, count in zip(WISHES, (19, 6, 12))]
    llm = made(device, "triton", name=name)
    found = texts(llm, params)
    assert found == texts(made(device, "reference", name=name), params)
    assert [len(tokens) for tokens, _ in found] == [19, 6, 12]
    assert llm.engine.report()["steps"] <= 5, "a prompt step and three times eight"
    assert texts(made(device, "triton", repeat=0, name=name), params) == found


def test_a_stop_token_inside_a_burst_ends_the_text_there(device: torch.device) -> None:
    free = texts(made(device, "triton"), [SamplingParams(max_tokens=16, ignore_eos=True, **wish) for wish in WISHES])
    stops = [tokens[5] for tokens, _ in free]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, stop_token_ids=[stop], **wish)
              for wish, stop in zip(WISHES, stops)]
    for (tokens, reason), (whole, _), stop in zip(texts(made(device, "triton"), params), free, stops):
        assert tokens == whole[:whole.index(stop) + 1] and reason == "stop"


def test_bursts_make_do_with_the_blocks_there_are(device: torch.device) -> None:
    """Eight blocks of four: three texts of 21 to 29 tokens do not fit side by side, so some are preempted."""
    params = [SamplingParams(max_tokens=18, ignore_eos=True, **wish) for wish in WISHES]
    small = {"kv_blocks": 8, "block_size": 4, "max_model_len": 32}
    llm = made(device, "triton", **small)
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert llm.engine.report()["preemptions"] > 0


def test_who_needs_the_host_runs_step_by_step_beside_the_others(device: torch.device) -> None:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0),
              SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.8, seed=3, repetition_penalty=1.3),
              SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.0, logprobs=2)]
    llm = made(device, "triton")
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert 8 <= llm.engine.report()["steps"] <= 9, "seven while the third runs, then the first alone"


def test_without_memory_for_graphs_steps_are_launched_one_by_one(device: torch.device,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **wish) for wish in WISHES]
    llm = made(device, "triton")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    decoder = llm.engine._device_decoder
    assert decoder is not None
    decoder._graphs.capture = full  # shared with the prompts' graphs
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert llm.engine._device_decoder is None and llm.engine.runner.graphs is None
    assert caplog.text.count("no memory to capture") == 2
