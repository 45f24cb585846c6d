"""What a card cannot do is refused with what it can, before weights are read; memory that runs out is met with less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.tiny import tiny_engine, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline import config as configs
from paceline.cache.storage import KVStorage
from paceline.config import GIB, EngineOptions, Facts
from paceline.engine import build
from paceline.engine.card import Card, check_card, check_weights
from paceline.errors import ConfigError

H200 = Card("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
A100 = Card("NVIDIA A100", (8, 0), 40 * GIB, 39 * GIB)
T4 = Card("Tesla T4", (7, 5), 15 * GIB, 14 * GIB)


@pytest.mark.parametrize("card", [H200, A100])
def test_what_a_card_can_do_is_let_through(card: Card) -> None:
    check_card(card, "auto", torch.bfloat16, "auto")
    check_weights(card, 8_000_000_000, torch.bfloat16)


@pytest.mark.parametrize(("card", "kernels", "dtype", "kv_dtype", "words"), [
    (T4, "auto", torch.bfloat16, "auto", ("Tesla T4", "7.5", "need compute capability 8.0", "kernels='eager'")),
    (T4, "triton", torch.float16, "auto", ("Tesla T4", "kernels='eager'", "device='cpu'")),
    (T4, "eager", torch.bfloat16, "auto", ("bfloat16", "dtype='float16'")),
    (A100, "auto", torch.bfloat16, "fp8", ("NVIDIA A100", "8.9", "kv_dtype='auto'")),
])
def test_what_it_cannot_is_refused_with_what_would_fit(card: Card, kernels: str, dtype: torch.dtype, kv_dtype: str,
                                                       words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_card(card, kernels, dtype, kv_dtype)
    assert all(word in str(refusal.value) for word in words)


def test_a_model_that_is_too_large_is_told_what_is_there_and_what_would_fit() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_weights(T4, 8_000_000_000, torch.float32)
    text = str(refusal.value)
    assert "29.8 GiB in float32" in text and "14.0 of 15.0 GiB free" in text
    assert "6.3 billion parameters in bfloat16" in text and "dtype='bfloat16' takes half" in text


def test_an_engine_looks_at_the_card_before_it_reads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (T4.free, T4.total))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(name=T4.name, major=7, minor=5))
    monkeypatch.setattr(build, "resolve", lambda *_, **__: pytest.fail("it went on to the model"))
    with pytest.raises(ConfigError, match=r"Tesla T4 \(compute capability 7\.5"):
        build.build_engine(EngineOptions.of(device="cuda"))


def test_without_a_card_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device.*device='cpu'.*doctor"):
        build.build_engine(EngineOptions.of(device="cuda"))


def test_a_cache_of_a_few_tokens_is_refused() -> None:
    facts = Facts(device="cuda", context=4096, bytes_per_token=131072, free_memory=16 << 20, cores=8)
    with pytest.raises(ConfigError, match=r"0\.02 GiB of cuda memory.*kv_dtype"):
        configs.resolve(EngineOptions.of(), facts)


@pytest.mark.parametrize(("share", "others", "left"), [(0.9, 0, 60), (0.5, 0, 20), (0.9, 30, 30), (0.3, 30, 0)])
def test_the_cache_takes_its_share_of_a_card(share: float, others: int, left: int) -> None:
    """A card of 100 MiB, weights of 30, texts of 0.02: what is beyond the share stays free."""
    free = (100 - 30 - others) << 20
    facts = Facts(device="cuda", context=256, bytes_per_token=64, free_memory=free, total_memory=100 << 20, cores=8)
    options = EngineOptions.of(gpu_memory_utilization=share, max_num_seqs=20)
    budget = configs.cache_budget(options, facts, 256 * 20)
    assert left - 0.03 < budget / (1 << 20) <= left


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, "half"])
def test_a_share_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match="above 0 and up to 1"):
        configs.check(EngineOptions.of(gpu_memory_utilization=share))


class _Full:
    """KVStorage on a device with room for so many blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.tried: list[int] = []
        init = KVStorage.__init__

        def limited(storage: KVStorage, groups: Any, num_blocks: Any, *rest: Any) -> None:
            self.tried.append(num_blocks[0] - 1)
            if num_blocks[0] - 1 > room:
                raise torch.OutOfMemoryError("no memory")
            init(storage, groups, num_blocks, *rest)

        monkeypatch.setattr(KVStorage, "__init__", limited)


def test_a_cache_that_does_not_fit_after_all_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    full = _Full(monkeypatch, 1500)
    llm = tiny_llm(kv_blocks=None, max_num_seqs=64)
    assert full.tried == [4096, 2048, 1024]
    assert llm.engine.config.kv_blocks == 1024
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize(("options", "word"), [({"kv_blocks": 400}, "lower kv_blocks"),
                                               ({"kv_blocks": None}, "smaller model")])
def test_where_nothing_fits_the_refusal_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any],
                                                            word: str) -> None:
    _Full(monkeypatch, 4)
    with pytest.raises(ConfigError, match=rf"cache blocks of 8 tokens take .* GiB.*{word}"):
        tiny_engine(tiny_model(), **options)


class _Small:
    """A device that has memory for steps of so many rows."""

    def __init__(self, llm: Any, rows: int) -> None:
        self.rows = rows
        self.refused: list[int] = []
        run = llm.engine.runner.run_batch

        def limited(batch: Any, *rest: Any) -> Any:
            if batch.layout.rows > self.rows:
                self.refused.append(batch.layout.rows)
                raise torch.OutOfMemoryError("no memory")
            return run(batch, *rest)

        llm.engine.runner.run_batch = limited


REQUESTS = ([list(range(1, 60)), list(range(2, 90)), [5, 6, 7]],
            [SamplingParams(max_tokens=9, temperature=0.8, seed=seed, ignore_eos=True) for seed in (1, 2, 3)])


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_a_step_without_memory_is_run_again_in_smaller_ones(speculation: Any) -> None:
    expected = [out.outputs[0].token_ids for out in tiny_llm().generate(*REQUESTS)]
    llm = tiny_llm(max_batch_tokens=256)
    device = _Small(llm, 64)
    outs = llm.generate(*REQUESTS, speculation=speculation)
    assert device.refused == [150, 128], "then 64 are allowed"
    assert [out.error for out in outs] == [None] * 3
    assert [out.outputs[0].token_ids for out in outs] == expected
    assert llm.engine.scheduler.config.max_batch_tokens == 64
    llm.engine.cache.check([])


def test_where_no_step_is_small_enough_requests_end_with_the_reason_and_the_engine_lives_on() -> None:
    llm = tiny_llm(max_batch_tokens=64)
    device = _Small(llm, 0)
    outs = llm.generate(*REQUESTS)
    assert all(out.error is not None and "no memory" in str(out.error) for out in outs)
    assert llm.engine.cache.usage().used == 0
    device.rows = 64
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
