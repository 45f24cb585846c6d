"""The promise: a request's tokens and logits are the same, to the bit, whatever happens around it.

Each cell runs one request under other circumstances than the reference run (alone, cold cache, whole prompt in one
step, one thread, no speculation) and compares tokens and the logits every token was drawn from.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.tiny import VOCAB, record, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.sampling.native import load as native_sampler
from pairwise import each, pairwise

PROMPT = [(i * 31 + 7) % VOCAB for i in range(75)]
NEW = 24
SEED = 1234567
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": SEED},
    "controlled": {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
                   "frequency_penalty": 0.1, "logit_bias": {5: 1.5, 9: -2.0}, "no_repeat_ngram_size": 3,
                   "seed": SEED},
}
UNTRUNCATED: dict[str, Any] = {"temperature": 1.0, "seed": SEED}
FAST_MODELS = ("llama", "qwen2", "mixtral")
SAMPLED_MODELS = ("deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2", "phi3", "qwen3_moe",
                  "shared_keys")
SAMPLED_CELLS = ("batch 8", "chunks of 7", "oracle-tree", "preempted in a batch, ahead")
"""Every run tries one of these with each of them."""
OTHER_MODELS = ("mistral", "qwen3", *SAMPLED_MODELS)
"""Run the same cells under `make test-full`."""


@dataclass(frozen=True)
class Cell:
    """Circumstances of one run."""

    name: str
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    threads: int = 1
    preempt: bool = False
    crowded: bool = False
    swapped: bool = False
    """Whoever is preempted goes to host memory instead of being computed again."""
    offloaded: bool = False
    """Our prompt was seen, and its blocks had to make room for others': they come back from host memory."""
    draft: dict[str, Any] | None = None


def drafts() -> dict[str, dict[str, Any]]:
    return {
        "oracle-chain": {"method": "oracle", "k": 5},
        "oracle-tree": {"method": "oracle", "k": 4, "branches": 3},
        "wrong-chain": {"method": "wrong", "k": 3},
        "wrong-tree": {"method": "wrong", "k": 3, "branches": 2},
    }


def fast_cells() -> list[Cell]:
    cells = [Cell("alone again"), Cell("2 threads", threads=2), Cell("warm cache", warm=True),
             Cell("batch 8", batch=8), Cell("batch 32, 2 threads", batch=32, threads=2),
             Cell("scheduled ahead", batch=4, options={"schedule_ahead": True}),
             Cell("preempted", preempt=True), Cell("preempted in a batch, ahead", batch=8, preempt=True,
                                                     options={"schedule_ahead": True})]
    cells += [Cell("crowded cache", batch=32, crowded=True),
              Cell("crowded cache, oracle tree", batch=32, crowded=True, draft=drafts()["oracle-tree"])]
    cells += [Cell(f"chunks of {size}", batch=2, options={"max_prefill_chunk": size}) for size in (1, 7, 64)]
    cells += [Cell(f"{name}", draft=draft) for name, draft in drafts().items()]
    cells += [Cell("oracle tree in a preempted batch", batch=8, preempt=True, draft=drafts()["oracle-tree"]),
              Cell("wrong tree in a warm batch", batch=8, warm=True, draft=drafts()["wrong-tree"]),
              Cell("oracle chain, ahead", batch=5, options={"schedule_ahead": True}, draft=drafts()["oracle-chain"])]
    return cells


def host_cells() -> list[Cell]:
    """What is in the cache has been to host memory and back. Without a prefix cache everything comes from there."""
    alone = {"enable_prefix_caching": False}
    cells = [Cell("swapped", preempt=True, swapped=True, options=alone),
             Cell("offloaded, oracle tree", offloaded=True, draft=drafts()["oracle-tree"]),
             Cell("swapped in a crowded cache", batch=16, crowded=True, swapped=True, options={"host_cache": 0.01}),
             Cell("swapped in a batch, ahead", batch=8, preempt=True, swapped=True,
                  options={"schedule_ahead": True} | alone)]
    cells += [Cell(f"swapped, {name}", batch=4, preempt=True, swapped=True, draft=draft, options=alone)
              for name, draft in drafts().items()]
    cells += [Cell("swapped in chunks, warm", batch=2, preempt=True, swapped=True, warm=True,
                   options={"max_prefill_chunk": 7}),
              Cell("crowded cache, swapped, oracle tree", batch=32, crowded=True, swapped=True,
                   draft=drafts()["oracle-tree"]),
              Cell("offloaded", offloaded=True), Cell("offloaded in a batch", batch=8, offloaded=True),
              Cell("offloaded, ahead, preempted", batch=8, offloaded=True, preempt=True,
                   options={"schedule_ahead": True}),
              Cell("offloaded, swapped, wrong chain", batch=8, offloaded=True, preempt=True, swapped=True,
                   draft=drafts()["wrong-chain"])]
    return cells


FEW_HOST_CELLS = host_cells()[:4]


def all_cells() -> list[Cell]:
    """The whole product, for `make test-full`, on one model; the fast cells cover the other models' layers."""
    cells = []
    for batch, chunk, warm, threads, preempt, ahead, (name, draft) in itertools.product(
            (1, 8, 32), (1, 7, 64, None), (False, True), (1, 2), (False, True), (False, True),
            [("plain", None), *drafts().items()]):
        cells.append(Cell(f"{name} b{batch} c{chunk} w{warm} t{threads} p{preempt} a{ahead}", batch,
                          {"max_prefill_chunk": chunk, "schedule_ahead": ahead}, warm, threads, preempt, draft=draft))
    return cells


@functools.cache
def model(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def reference(subject: Any, style: str, **options: Any) -> tuple[list[int], list[torch.Tensor]]:
    """What a model says alone, and the logits of every token: the `expected` of run_cell."""
    torch.set_num_threads(1)
    llm = tiny_llm(subject, enable_prefix_caching=False, **options)
    pipeline = record(llm)
    out = llm.generate([PROMPT], params(style))[0]
    assert out.error is None
    tokens = out.outputs[0].token_ids
    assert len(tokens) == NEW and len(set(tokens)) > 5, "the reference should be a lively text"
    return tokens, pipeline.logits_of(out.seed, len(PROMPT), tokens)


def params(style: str) -> SamplingParams:
    controls = UNTRUNCATED if style == "untruncated" else STYLES[style]
    return SamplingParams(max_tokens=NEW, ignore_eos=True, **({"seed": SEED} | controls))


def strangers(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Other people's requests: other lengths and parameters, some sharing our prompt's beginning."""
    luck = random.Random(count)
    prompts, their_params = [], []
    for index in range(count):
        own = [luck.randrange(VOCAB) for _ in range(luck.randrange(1, 60))]
        prompts.append(PROMPT[:luck.randrange(0, 40)] * (index % 3 == 0) + own)
        their_params.append(SamplingParams(max_tokens=luck.randrange(1, 30), temperature=luck.choice([0.0, 0.7, 1.3]),
                                           seed=luck.randrange(1 << 40), top_k=luck.choice([0, 5])))
    return prompts, their_params


def preempt_at(llm: Any, place: int, steps: tuple[int, ...]) -> None:
    """Take our request's blocks away before the given steps, as a crowded cache would."""
    engine, step, count = llm.engine, llm.engine.step, itertools.count()

    def crowded() -> Any:
        if next(count) in steps:
            for seq in [seq for seq in engine.scheduler.running if seq.request.id == f"request-{place}"]:
                engine.scheduler.preempt(seq)
        return step()

    engine.step = crowded


def run_cell(subject: Any, style: str, cell: Cell, expected: tuple[list[int], list[torch.Tensor]]) -> None:
    """Run `subject` (a model) under the cell's circumstances and compare with what it said alone."""
    tokens, logits = expected
    options = dict(cell.options)
    if cell.crowded or cell.offloaded:
        options |= {"kv_blocks": 16, "max_model_len": 120, "watermark": 0.0}
    options |= {"preemption": "swap", "swap_space": 0.01} if cell.swapped else {"preemption": "recompute"}
    if cell.offloaded:
        options["host_cache"] = 0.01
    torch.set_num_threads(cell.threads)
    try:
        llm = tiny_llm(subject, **options)
        if cell.warm or cell.offloaded:
            llm.generate([PROMPT + [3]], SamplingParams(max_tokens=2, temperature=0.0))
            if cell.offloaded:
                llm.generate([[VOCAB - 1 - token for token in PROMPT + PROMPT[:44]]], SamplingParams(max_tokens=1))
            llm.engine._ids = itertools.count()
        pipeline = record(llm)
        prompts, their_params = strangers(cell.batch - 1)
        place = min(2, cell.batch - 1)
        prompts.insert(place, list(PROMPT))
        their_params.insert(place, params(style))
        wishes: list[Any] = [None] * cell.batch
        if cell.draft is not None:
            wishes[place] = cell.draft | {"tokens": tokens}
        if cell.preempt:
            preempt_at(llm, place, steps=(1, 4, 9))
        outs = llm.generate(prompts, their_params, speculation=wishes)
    finally:
        torch.set_num_threads(1)
    out = outs[place]
    assert out.error is None
    assert out.outputs[0].token_ids == tokens
    for index, (got, want) in enumerate(zip(pipeline.logits_of(out.seed, len(PROMPT), tokens), logits, strict=True)):
        assert torch.equal(got, want), f"logits of token {index} differ"
    if cell.warm:
        assert out.metrics.cached_tokens > 0
    if cell.crowded:
        assert llm.engine.metrics.preemptions > 0, "this cell is meant to run out of blocks"
    cache = llm.engine.cache
    if cell.swapped:
        assert cache.swap.blocks_in > 0, "this cell is meant to bring blocks back from the host"
    if cell.offloaded:
        assert cache.cold.blocks_in > 0, "this cell is meant to find blocks on the host"
    assert cache.swap.used == 0
    if cell.preempt:
        assert out.metrics.preemptions >= 2, "this cell is meant to preempt"
    if cell.draft is not None:
        accepted = out.speculation.accepted
        assert accepted == 0 if cell.draft["method"] == "wrong" else accepted > NEW // 2
    llm.engine.cache.check([])


@each(cell=fast_cells(), subject={f"{name}-{style}": (name, style) for name in FAST_MODELS for style in STYLES})
def test_tokens_and_logits_are_equal(subject: tuple[str, str], cell: Cell) -> None:
    name, style = subject
    run_cell(model(name), style, cell, reference(model(name), style))


@pytest.mark.parametrize(("name", "cell"), [
    (name, cell) for i, name in enumerate(SAMPLED_MODELS)
    for j, cell in enumerate(cell for cell in fast_cells() if cell.name in SAMPLED_CELLS) if (i + j) % 4 == 0],
    ids=lambda value: getattr(value, "name", value))
def test_some_cells_of_more_models(name: str, cell: Cell) -> None:
    run_cell(model(name), "seeded", cell, reference(model(name), "seeded"))


@each(cell=FEW_HOST_CELLS, name=["llama", "qwen2"])
def test_host_memory_and_back_changes_nothing(name: str, cell: Cell) -> None:
    run_cell(model(name), "seeded", cell, reference(model(name), "seeded"))


@pytest.mark.full
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", FAST_MODELS + OTHER_MODELS)
@pytest.mark.parametrize("cell", host_cells(), ids=lambda cell: cell.name)
def test_host_memory_in_all_circumstances(name: str, style: str, cell: Cell) -> None:
    run_cell(model(name), style, cell, reference(model(name), style))


@pairwise(cell=[cell for cell in fast_cells() if cell.name in ("batch 8", "oracle-tree", "wrong-tree")],
          sampler=["numpy", "native"], style=["seeded", "controlled", "untruncated"])
def test_either_sampler_draws_the_same(style: str, cell: Cell, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether numpy draws or native code: the reference run is the native one's, where it is built."""
    expected = reference(model("llama"), style)
    if sampler == "numpy":
        for module in ("paceline.engine.core", "engine.tiny"):
            monkeypatch.setattr(f"{module}.native_sampler", lambda: None)
    elif native_sampler() is None:
        pytest.skip("the native library is not built")
    run_cell(model("llama"), style, cell, expected)


@pytest.mark.full
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", OTHER_MODELS)
@pytest.mark.parametrize("cell", fast_cells(), ids=lambda cell: cell.name)
def test_the_other_models(name: str, style: str, cell: Cell) -> None:
    run_cell(model(name), style, cell, reference(model(name), style))


@pytest.mark.full
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cell", all_cells(), ids=lambda cell: cell.name)
def test_the_whole_matrix(style: str, cell: Cell) -> None:
    run_cell(model("llama"), style, cell, reference(model("llama"), style))


def test_two_different_seeds_differ() -> None:
    """Otherwise the seeded cells would prove nothing."""
    llm = tiny_llm(model("llama"))
    outs = llm.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=NEW, temperature=0.9, seed=s) for s in (1, 2)])
    assert outs[0].outputs[0].token_ids != outs[1].outputs[0].token_ids


def test_eager_kernels_would_fail_this_matrix_or_tie() -> None:
    """The default kernels promise equality up to numerical ties: tokens here agree, bits need not."""
    tokens, _ = reference(model("llama"), "greedy")
    llm = tiny_llm(model("llama"), deterministic=False)
    prompts, their_params = strangers(7)
    out = llm.generate([PROMPT, *prompts], [params("greedy"), *their_params])[0]
    assert out.outputs[0].token_ids == tokens
