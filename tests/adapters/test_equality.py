"""The promise for requests with adapters: the text of the merged model, in any company, however it is computed."""

from __future__ import annotations

import functools
import inspect
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.adapter_files import ATTENTION, MLP, factors, merged_model, shapes_of, tiny_model, write_adapter
from engine.test_equality_matrix import NEW, PROMPT, Cell, fast_cells, params, preempt_at, strangers
from engine.tiny import record, tiny_llm
from paceline import LLM, SamplingParams
from paceline.engine.drafting.models import LoadedModel
from paceline.kernels.adapted import _AdaptedKernels
from paceline.kernels.interface import Kernels

TARGETS = {"one": ATTENTION + MLP, "two": ["q_proj", "v_proj"], "three": ["gate_proj", "down_proj", "lm_head"]}
"""Adapters by name, with what they add to: everything, little, and the head as well."""
Expected = tuple[list[int], list[torch.Tensor]]


UNTIED = {"tie_word_embeddings": False}
"""A head of its own, so that it can be merged."""


@functools.cache
def model(name: str) -> Any:
    return tiny_model(name, **UNTIED)


@functools.cache
def tensors(name: str, adapter: str) -> dict[str, torch.Tensor]:
    return factors(shapes_of(model(name), TARGETS[adapter]), adapter, rank=5 if adapter == "two" else 4)


def llm_with(name: str = "llama", adapters: Any = TARGETS, **options: Any) -> LLM:
    llm = tiny_llm(model(name), **options)
    with tempfile.TemporaryDirectory() as folder:
        for adapter in adapters:
            own = tensors(name, adapter)
            rank = 5 if adapter == "two" else 4
            llm.load_adapter(adapter, str(write_adapter(Path(folder) / adapter, own, r=rank,
                                                        target_modules=TARGETS[adapter])))
    return llm


def run(llm: LLM, style: str, adapter: str | None = None) -> Expected:
    pipeline = record(llm)
    out = llm.generate([PROMPT], params(style), adapter=adapter)[0]
    tokens = out.outputs[0].token_ids
    assert len(tokens) == NEW and len(set(tokens)) > 5, "it should be a lively text"
    return tokens, pipeline.logits_of(out.seed, len(PROMPT), tokens)


@functools.cache
def alone(name: str, style: str, adapter: str | None) -> Expected:
    return run(llm_with(name, enable_prefix_caching=False), style, adapter)


@pytest.mark.parametrize(("name", "adapter"), [("llama", "one"), ("mistral", "three"), ("qwen2", "two"),
                                               ("qwen3", "one")])
def test_tokens_are_those_of_the_merged_model(name: str, adapter: str) -> None:
    """Greedy tokens are equal, and so the texts before each of them: the logits compared are teacher-forced."""
    want, logits = run(tiny_llm(merged_model(name, tensors(name, adapter), UNTIED)), "greedy")
    got, ours = alone(name, "greedy", adapter)
    assert got == want
    assert got != alone(name, "greedy", None)[0], "the adapter should make a difference"
    for left, right in zip(ours, logits, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_the_attention_of_a_mixture_takes_an_adapter() -> None:
    mixed, shapes = model("mixtral"), shapes_of(model("mixtral"), ATTENTION)
    own = factors(shapes, "mixture")
    want, logits = run(tiny_llm(merged_model("mixtral", own, UNTIED)), "greedy")
    llm = tiny_llm(mixed)
    with tempfile.TemporaryDirectory() as folder:
        llm.load_adapter("own", str(write_adapter(Path(folder), own, target_modules=ATTENTION)))
    got, ours = run(llm, "greedy", "own")
    assert got == want
    for left, right in zip(ours, logits, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def run_cell(name: str, style: str, cell: Cell, adapter: str | None) -> None:
    """One request among others that have this adapter, other ones or none, compared to the bit with it alone."""
    tokens, logits = alone(name, style, adapter)
    options = dict(cell.options)
    if cell.crowded:
        options |= {"kv_blocks": 16, "max_model_len": 120, "watermark": 0.0}
    torch.set_num_threads(cell.threads)
    try:
        llm = llm_with(name, **options)
        if cell.warm:
            llm.generate([PROMPT + [3]] * 4, SamplingParams(max_tokens=2, temperature=0.0),
                         adapter=["two", None, "one", "three"])
            llm.engine._ids = itertools.count()
        pipeline = record(llm)
        prompts, their_params = strangers(cell.batch - 1)
        theirs: list[str | None] = [[None, *TARGETS][index % 4] for index in range(len(prompts))]
        place = min(2, cell.batch - 1)
        prompts.insert(place, list(PROMPT))
        their_params.insert(place, params(style))
        theirs.insert(place, adapter)
        wishes: list[Any] = [None] * cell.batch
        if cell.draft is not None:
            wishes[place] = cell.draft | {"tokens": tokens}
        if cell.preempt:
            preempt_at(llm, place, steps=(1, 4, 9))
        outs = llm.generate(prompts, their_params, speculation=wishes, adapter=theirs)
    finally:
        torch.set_num_threads(1)
    out = outs[place]
    assert out.error is None
    assert out.outputs[0].token_ids == tokens
    for index, (got, want) in enumerate(zip(pipeline.logits_of(out.seed, len(PROMPT), tokens), logits, strict=True)):
        assert torch.equal(got, want), f"logits of token {index} differ"
    if cell.warm:
        assert out.metrics.cached_tokens > 0
    if cell.preempt:
        assert out.metrics.preemptions >= 2, "this cell is meant to preempt"
    if cell.draft is not None and cell.draft["method"] == "oracle":
        assert out.speculation.accepted > NEW // 2
    llm.engine.cache.check([])


@pytest.mark.parametrize("cell", [cell for cell in fast_cells() if not cell.crowded], ids=lambda cell: cell.name)
def test_bits_do_not_depend_on_the_company(cell: Cell) -> None:
    run_cell("llama", "seeded", cell, "one")


@pytest.mark.parametrize("cell", [Cell("batch 8", batch=8), Cell("chunks of 7", batch=4,
                                                                 options={"max_prefill_chunk": 7})],
                         ids=lambda cell: cell.name)
def test_bits_of_the_model_as_it_is_do_not_depend_on_adapters_beside_it(cell: Cell) -> None:
    run_cell("llama", "seeded", cell, None)


def test_bits_survive_a_swap_to_the_host() -> None:
    run_cell("llama", "seeded", Cell("swapped", batch=4, preempt=True, options={"preemption": "swap"}), "one")


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["one", None])
@pytest.mark.parametrize("cell", [cell for cell in fast_cells() if cell.crowded], ids=lambda cell: cell.name)
def test_bits_in_a_crowded_cache(cell: Cell, adapter: str | None) -> None:
    run_cell("llama", "seeded", cell, adapter)


@pytest.mark.full
@pytest.mark.parametrize("adapter", ["two", "three", None])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("cell", fast_cells(), ids=lambda cell: cell.name)
def test_bits_of_other_models(name: str, cell: Cell, adapter: str | None) -> None:
    run_cell(name, "controlled", cell, adapter)


@pytest.mark.parametrize("wish", [{"method": "skip", "skip": [1]}, {"method": "exit", "layers": 2},
                                  {"method": "draft", "model": "own"}], ids=lambda wish: wish["method"])
def test_models_that_draft_change_nothing(wish: dict[str, Any]) -> None:
    """Reduced forms of the model draft with the adapter, other models without; both are verified with it."""
    llm = llm_with("llama")
    llm.engine.draft_models.add("own", LoadedModel(model("llama"), None, llm.engine.kernels))
    outs = llm.generate([PROMPT] * 3, params("greedy"), speculation=wish | {"k": 3, "adaptive": False},
                        adapter=["one", None, "two"])
    for out, adapter in zip(outs, ["one", None, "two"]):
        assert out.error is None
        assert out.outputs[0].token_ids == alone("llama", "greedy", adapter)[0]
        assert out.speculation.drafted
    llm.engine.cache.check([])


def test_a_reduced_model_drafts_with_the_adapter() -> None:
    """It has the same luck as a reduced form of the merged model."""
    wish = {"method": "exit", "layers": 2, "k": 3, "adaptive": False}
    merged = tiny_llm(merged_model("llama", tensors("llama", "one"), UNTIED))
    want = merged.generate([PROMPT], params("greedy"), speculation=wish)[0].speculation
    got = llm_with("llama").generate([PROMPT], params("greedy"), speculation=wish, adapter="one")[0].speculation
    assert (got.drafted, got.accepted) == (want.drafted, want.accepted)
    assert got.accepted > 0


def test_samples_of_a_request_share_its_adapter() -> None:
    llm = llm_with("llama")
    many = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=12, seed=5), adapter="one")[0]
    merged = tiny_llm(merged_model("llama", tensors("llama", "one"), UNTIED))
    want = merged.generate([PROMPT], SamplingParams(n=3, max_tokens=12, seed=5))[0]
    assert [own.token_ids for own in many.outputs] == [own.token_ids for own in want.outputs]


def test_beams_are_those_of_the_merged_model() -> None:
    search = SamplingParams(beam_width=3, n=3, max_tokens=10, ignore_eos=True, temperature=0.0)
    out, other = llm_with("llama").generate([PROMPT, PROMPT], search, adapter=["one", None])
    want = tiny_llm(merged_model("llama", tensors("llama", "one"), UNTIED)).generate([PROMPT], search)[0]
    assert [own.token_ids for own in out.outputs] == [own.token_ids for own in want.outputs]
    assert out.outputs[0].token_ids != other.outputs[0].token_ids


def test_eager_kernels_give_the_merged_text_too() -> None:
    llm = llm_with("llama", deterministic=False)
    prompts, their_params = strangers(7)
    outs = llm.generate([PROMPT, *prompts], [params("greedy"), *their_params],
                        adapter=["one", *[None, "two"] * 3, None])
    assert outs[0].outputs[0].token_ids == alone("llama", "greedy", "one")[0]


def test_a_step_without_adapters_runs_on_the_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and unused, adapters cost nothing."""
    def never(*_: Any) -> None:
        raise AssertionError("no row has an adapter")

    monkeypatch.setattr("paceline.kernels.adapted._AdaptedKernels.__init__", never)
    out = llm_with("llama").generate([PROMPT], params("greedy"))[0]
    assert out.outputs[0].token_ids == alone("llama", "greedy", None)[0]


def test_every_kernel_that_takes_a_weight_adds() -> None:
    """A new one that the wrapper does not know would leave adapters out without a word."""
    takes = {name for name, op in vars(Kernels).items() if callable(op) and not name.startswith("_")
             and "Weight" in inspect.get_annotations(op).values()}
    assert {"linear", "project", "gated", "gate_up", "linear_add", "head"} <= takes
    assert takes <= set(vars(_AdaptedKernels))
