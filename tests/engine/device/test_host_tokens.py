"""The device path in plain torch (kernels="stepped"): every kind of request has the tokens of the host's path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.device.on_device import HEAVY, SEEDED, alone_on_device, made, on_host, outs, same
from engine.tiny import tiny_llm, tiny_model
from paceline import LLM
from paceline.engine.execute.host_executor import HostExecutor
from paceline.errors import ConfigError
from paceline.kernels import select

WISHES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": 0.0}, SEEDED, SEEDED | {"top_k": 9, "top_p": 0.9}],
    "penalties": [SEEDED | HEAVY | {"top_k": 5}, {"temperature": 0.0} | HEAVY, {"temperature": 0.0}],
    "bias": [SEEDED | {"logit_bias": {5: 4.0, 9: -math.inf}}, SEEDED | {"allowed_token_ids": list(range(0, 90, 3))},
             {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [5], "logit_bias": {5: 50.0}}],
    "masks": [{"temperature": 0.0, "no_repeat_ngram_size": 1}, SEEDED | HEAVY | {"no_repeat_ngram_size": 2}, SEEDED],
    "scores": [SEEDED | {"logprobs": 3, "top_k": 20}, {"temperature": 0.0, "logprobs": 0},
               SEEDED | HEAVY | {"logprobs": 2, "min_p": 0.01}],
    "no token": [{"temperature": 0.0, "allowed_token_ids": [5], "logit_bias": {5: -math.inf}}, SEEDED, SEEDED],
}
EXIT: dict[str, Any] = {"method": "exit", "layers": 1, "adaptive": False}


def stepped(repeat: int = 3, **options: Any) -> LLM:
    """Whose host may not sample: whatever is asked for here, the device must decide."""
    return alone_on_device(made(repeat, **options))


@pytest.mark.parametrize("kind", WISHES)
def test_the_device_samples_what_the_host_does(kind: str) -> None:
    same(outs(stepped(), WISHES[kind]), outs(on_host(), WISHES[kind]))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "shared_keys"])
def test_windows_caps_and_shared_keys(name: str) -> None:
    same(outs(stepped(name=name), WISHES["plain"]),
         outs(on_host(name), WISHES["plain"]))


@pytest.mark.parametrize("options", [{"max_prefill_chunk": 3}, {"max_num_seqs": 2}, {"kv_dtype": "fp8"},
                                     {"kv_blocks": 8, "block_size": 4, "max_model_len": 32}])
def test_prompts_in_pieces_few_seats_codes_and_few_blocks(options: dict[str, Any]) -> None:
    expected = outs(on_host(**options), WISHES["plain"])
    for repeat in (1, 4):
        same(outs(stepped(repeat, **options), WISHES["plain"]), expected)


@pytest.mark.parametrize("kind", ["plain", "penalties", "masks", "scores"])
@pytest.mark.parametrize(("method", "branches"), [("oracle", 1), ("oracle", 3), ("wrong", 2)])
def test_drafts_are_verified_and_moved_on_the_device(kind: str, method: str, branches: int) -> None:
    expected = outs(on_host(), WISHES[kind])
    tokens = expected[0].outputs[0].token_ids
    wish = {"method": method, "k": 3, "branches": branches, "tokens": tokens}
    llm = stepped()
    found = outs(llm, WISHES[kind], speculation=[wish, None, None])
    same(found, expected)
    assert found[0].speculation is not None and found[0].speculation.failure is None
    assert bool(llm.engine.report()["accepted"]) == (method == "oracle")


@pytest.mark.parametrize("wish", [EXIT | {"k": 2}, EXIT | {"branches": [2, 2]},
                                  {"method": "skip", "skip": ["mlp.1"], "k": 3, "adaptive": False}])
def test_models_that_draft_sample_there_too(wish: dict[str, Any]) -> None:
    found = outs(stepped(), WISHES["plain"], speculation=[wish, wish, wish])
    same(found, outs(on_host(), WISHES["plain"]))
    assert all(out.speculation is not None and out.speculation.failure is None for out in found)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2"])
def test_what_cannot_be_captured_runs_step_by_step(name: str) -> None:
    llm = tiny_llm(tiny_model(name), kernels="stepped")
    assert isinstance(llm.engine.executor, HostExecutor)
    same(outs(llm, WISHES["plain"]), outs(on_host(name), WISHES["plain"]))


def test_it_is_there_on_the_cpu_only() -> None:
    with pytest.raises(ConfigError, match="on the CPU only"):
        select(True, torch.device("cuda"), "stepped")
