"""bench gpu without a card: what it refuses, and the sizes it reports."""

from __future__ import annotations

import inspect

import pytest
import torch

from engine.device.on_device import made, on_host
from paceline.bench import gpu, gpu_host, gpu_load, gpu_oracle, gpu_peers
from paceline.bench.gpu_shapes import SHAPES, cache_bytes, config_of, weight_bytes
from paceline.cli.bench import gpu as command
from paceline.cli.main import main
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.errors import ConfigError
from paceline.request import SamplingParams


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b.*smollm2-135m"):
        config_of("llama-9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) != 0
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--batches", "0"], ["--peers", "1,x"], ["--dtype", "int3"], ["--shape", "llama-9"],
                                   ["--requests", "0"]])
def test_wrong_options_are_named_before_a_card_is_looked_for(wrong: list[str],
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *wrong]) != 0
    said = capsys.readouterr().err
    assert wrong[0].lstrip("-") in said and "no CUDA device" not in said


def test_every_shape_is_one_the_models_know_and_the_8b_reads_15_gb() -> None:
    for shape in SHAPES:
        assert weight_bytes(config_of(shape), torch.bfloat16) > 0
    assert weight_bytes(config_of("llama-3.1-8b"), torch.bfloat16) / 1e9 == pytest.approx(15.0, abs=0.1)


def test_transformers_runs_the_same_shape_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    tiny = SHAPES["smollm2-135m"] | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                     "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    monkeypatch.setattr(gpu_peers, "PEERS", (gpu_peers.Transformers,))
    found = gpu_peers.measure("tiny", "float32", ("tpot", "ttft"), (1, 2), 12, device="cpu")
    assert set(found) == {"tpot_1", "tpot_2", "ttft_2048"}
    assert all(name.startswith("transformers ") for peers in found.values() for name in peers)


def test_a_peer_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(gpu_peers.Transformers):
        name, package = "broken", "json"

        def __init__(self, *_: object) -> None:
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_peers, "PEERS", (Broken,))
    assert gpu_peers.measure("smollm2-135m", "float32", ("ttft",), (), 12, device="cpu") == {}
    assert "broken is left out (RuntimeError: no such kernel)" in capsys.readouterr().err


def test_what_a_step_reads_of_its_caches() -> None:
    """8B: 32 layers, 8 KV heads of 128, 16 bits."""
    assert cache_bytes(config_of("llama-3.1-8b"), torch.bfloat16, 3) == 3 * 2 * 32 * 8 * 128 * 2


def test_the_command_measures_every_case_there_is_unless_told_otherwise() -> None:
    assert inspect.signature(command).parameters["cases"].default.split(",") == list(gpu.CASES)


def test_ways_to_sample_are_parameters_that_differ() -> None:
    ways = [SamplingParams(**own) for own in gpu.CONTROLS.values()]
    assert len({repr(way) for way in ways}) == len(ways)


@pytest.mark.parametrize("way", gpu_host.WAYS)
@pytest.mark.parametrize("requests", [1, 3])
def test_how_long_a_device_waits_for_the_host(way: str, requests: int) -> None:
    """On the device path in torch, where the device is the host: small, and not nothing."""
    llm = made(2, max_model_len=64)
    assert 0.0 < gpu_host.host_gap(llm, way, requests, prompt=12, tokens=16) < 10_000.0


def test_where_nothing_is_captured_there_is_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="steps are captured"):
        gpu_host.host_gap(on_host(), "plain", 1, prompt=4, tokens=4)


def test_too_few_tokens_are_named() -> None:
    with pytest.raises(ConfigError, match="1 tokens are too few to measure suffix"):
        gpu_host.host_gap(made(2), "suffix", 1, prompt=12, tokens=1)


def test_an_oracle_drafts_in_the_step_and_is_right_as_often_as_it_says() -> None:
    llm = made(8, max_model_len=200, kv_blocks=200)
    executor = llm.engine.executor
    assert isinstance(executor, GraphExecutor)
    before = executor.graphs.decode.drafter
    found = {chance: gpu_oracle.measure(llm, [3, 14, 15, 92], llm.engine.model.config.vocab_size, 2, chance, 1, 48)
             for chance in (0.0, 0.8, 1.0)}
    assert found[0.0].per_step == pytest.approx(1.0)
    assert found[1.0].per_step > 4 > found[0.8].per_step > 2.2  # 1 + .8 + .64 + .51 + .41 in the long run
    assert all(one.taken > 0 and one.device > 0 for one in found.values())
    assert executor.graphs.decode.drafter is before
    with pytest.raises(ConfigError, match="steps are captured"):
        gpu_oracle.measure(on_host(max_model_len=200, kv_blocks=200), [3, 14, 15, 92], 97, 1, 0.5)


def test_every_load_is_served_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_load, "LOADS", (20, 150))
    monkeypatch.setattr(gpu_load, "OUTPUT", 12)
    monkeypatch.setattr(gpu_load, "CROWD", 4)
    monkeypatch.setattr(gpu_load, "_WARM", (1, 4))
    llm = made(4, max_model_len=200, kv_blocks=200)
    capacity, found = gpu_load.sweep(llm, [3, 14, 15, 92], llm.engine.model.config.vocab_size, 0.3, 60)
    assert capacity > 0 and set(found) == {(load, way) for load in (20, 150) for way in ("off", "on", "control")}
    assert all(0.0 <= one.goodput <= one.rate and one.ttft > 0 and one.tpot > 0 for one in found.values())
