"""Several steps between two looks of the host: the same tokens as one by one, whatever ends a text on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.tiny import BASE, SHAPES, RandomWeights
from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.execute.graphs.in_flight import Sampled
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
    options = {"deterministic": True, "kv_blocks": 40, "block_size": 8, "max_num_seqs": 8, "kernels": kernels,
               "capture": "lazy" if repeat else "never"} | more
    shape = ModelConfig.from_dict(BASE | SHAPES[name])
    model = build(shape, OnDevice(device), 512)
    llm = LLM.from_engine(engine_for(model, None, EngineOptions.of(**options), device=device, revision="tiny"))
    steps = llm.engine.loop.device_steps
    assert (steps is not None) == (kernels == "triton" and bool(repeat))
    if steps is not None:
        steps.repeats = lambda *_: repeat  # the interpreter is so slow that it would always be one
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
              SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.0, logprobs=2, trace=True)]
    llm = made(device, "triton")
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert 8 <= llm.engine.report()["steps"] <= 9, "seven while the third runs, then the first alone"


def test_without_memory_for_graphs_steps_are_launched_one_by_one(device: torch.device,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **wish) for wish in WISHES]
    llm = made(device, "triton")

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    steps = llm.engine.loop.device_steps
    assert steps is not None and steps.decoder is not None
    steps.decoder._graphs.capture = full  # shared with the prompts' graphs
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert steps.decoder is None and llm.engine.runner.graphs is None
    assert caplog.text.count("no memory to capture") == 2


def test_steps_launched_ahead_let_in_who_waits(device: torch.device) -> None:
    """Two seats for six texts, some of which stop early: seats change hands while steps are in flight."""
    prompts = [*PROMPTS, *([token + 1 for token in prompt] for prompt in PROMPTS)]
    free = [SamplingParams(max_tokens=11, ignore_eos=True, **WISHES[i % 3]) for i in range(6)]
    options: dict[str, Any] = {"max_num_seqs": 2, "max_prefill_chunk": 4, "enable_prefix_caching": True}
    whole = [out.outputs[0].token_ids for out in made(device, "reference", **options).generate(prompts, free)]
    params = [SamplingParams(max_tokens=own.max_tokens, ignore_eos=True, **WISHES[i % 3],
                             stop_token_ids=[tokens[4]] if i % 2 else [])
              for i, (own, tokens) in enumerate(zip(free, whole))]
    for repeat in (1, 3):
        llm = made(device, "triton", repeat, **options)
        found = llm.generate(prompts, params)
        for i, (out, tokens) in enumerate(zip(found, whole)):
            kept = tokens[:tokens.index(tokens[4]) + 1] if i % 2 else tokens
            assert out.outputs[0].token_ids == kept
        assert not llm.engine.has_work and llm.engine.cache.usage().used == 0


def test_a_step_is_launched_before_the_one_in_front_of_it_is_read(device: torch.device) -> None:
    llm = made(device, "triton", 2)
    steps = llm.engine.loop.device_steps
    assert steps is not None
    seen: list[int] = []
    read = steps.read

    def watched() -> list[Sampled]:
        seen.append(len(steps.launched))
        return read()

    steps.read = watched  # type: ignore[method-assign]
    texts(llm, [SamplingParams(max_tokens=9, ignore_eos=True, **wish) for wish in WISHES])
    assert seen == [2, 2, 2, 2, 1], "prompts, then four times two tokens"


def test_whose_next_token_the_host_must_know_waits_for_those_in_flight(device: torch.device) -> None:
    """It comes while the others' steps are in flight, and leaves before them."""
    llm, plain = made(device, "triton", 2), made(device, "reference")
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **wish) for count, wish in zip((14, 3, 12), WISHES)]
    params[1] = SamplingParams(max_tokens=3, ignore_eos=True, repetition_penalty=1.5, logprobs=1, prompt_logprobs=1,
                               trace=True, temperature=0.0)
    for one in (llm, plain):
        engine = one.engine
        first = engine.add(list(PROMPTS[0]), params[0])
        engine.step()
        engine.step()
        rest = [engine.add(list(prompt), own) for prompt, own in zip(PROMPTS[1:], params[1:])]
        while engine.has_work:
            engine.step()
        one.records = [engine.take(name).snapshot() for name in (first, *rest)]  # type: ignore[attr-defined]
    for ours, theirs in zip(llm.records, plain.records):  # type: ignore[attr-defined]
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids and ours.error is None
        assert len(ours.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])


@pytest.mark.parametrize("newcomer", ["drafted", "traced"])
@pytest.mark.parametrize("ends", ["cancelled", "by itself"])
def test_who_ends_between_plan_and_run_takes_nobody_along(device: torch.device, newcomer: str, ends: str) -> None:
    """A newcomer that needs the host makes the next step one that waits; meanwhile somebody in it ends."""
    long_prompt = PROMPTS[2] * 2
    more: dict[str, Any] = {"trace": True} if newcomer == "traced" else {}
    speculation = "ngram" if newcomer == "drafted" else None
    rest = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    asked = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, **more)
    plain = made(device, "reference", max_batch_tokens=16)
    wanted = [out.outputs[0].token_ids for out in plain.generate([PROMPTS[1], long_prompt], [rest, asked])]
    engine = made(device, "triton", repeat=2, max_batch_tokens=16).engine
    first = engine.add(PROMPTS[0], SamplingParams(max_tokens=8 if ends == "cancelled" else 4, ignore_eos=True,
                                                  temperature=0.0))
    others = [engine.add(PROMPTS[1], rest)]
    engine.step()
    others.append(engine.add(long_prompt, asked, speculation=speculation))
    engine.step()
    if ends == "cancelled":
        engine.cancel(first)
    while engine.has_work:
        engine.step()
    for name, tokens in zip(others, wanted):
        out = engine.take(name).snapshot()
        assert out.error is None and out.outputs[0].token_ids == tokens
    assert engine.cache.usage().used == 0


def test_a_burst_without_memory_is_decoded_step_by_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **wish) for wish in WISHES]
    llm = made(device, "triton")
    decoder = llm.engine.loop.device_steps.decoder

    def no_memory(step: Any) -> Any:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(decoder, "launch", no_memory)
    assert texts(llm, params) == texts(made(device, "reference"), params)
    assert llm.engine.loop.device_steps.decoder is None
