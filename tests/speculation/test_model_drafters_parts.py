"""The parts that model drafters are made of: reduced models, packed weights, vocabularies, the default skip list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models as backend_models

from engine.tiny import VOCAB, RandomWeights, tiny_llm
from paceline import LLM, SamplingParams
from paceline.engine.drafting.cached_models import _lead
from paceline.engine.drafting.models import LoadedModel, check_same_vocabulary
from paceline.errors import RequestError
from paceline.kernels import cpu
from paceline.kernels.reference import ReferenceKernels
from paceline.models.load.dequant import dequantize
from paceline.models.native import NativeDecoder
from paceline.models.reduced import LowBitWeights, ShorterModel, four_bit_blocks
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.speculation.drafters.skip import default_skip, read_skip
from skip_lists import candidates, forecast, measure
from speculation.model_drafting import PROMPT, drafting_llm, shape, target

needs_native = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here")


def prompt_scores(model: Any) -> torch.Tensor:
    out = tiny_llm(model).generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    return torch.tensor([score.raw for score in out.prompt_logprobs[1:]], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["llama", pytest.param("native", marks=needs_native)])
def test_leaving_out_the_last_layers_is_leaving_early(kind: str) -> None:
    model = target(kind)
    last_two = frozenset((layer, part) for layer in (2, 3) for part in ("attn", "mlp"))
    early, skipped = prompt_scores(ShorterModel(model, 2)), prompt_scores(ShorterModel(model, skip=last_two))
    assert torch.equal(early, skipped)
    assert not torch.equal(early, prompt_scores(model))
    assert torch.equal(prompt_scores(ShorterModel(model, 4)), prompt_scores(model))


@needs_native
def test_native_and_torch_skip_the_same_layers() -> None:
    skip = frozenset((layer, part) for layer in (0, 2) for part in ("attn", "mlp"))
    ours = prompt_scores(ShorterModel(NativeDecoder(shape("llama"), RandomWeights(0.7), 512, threads=1), skip=skip))
    theirs = prompt_scores(ShorterModel(build(shape("llama"), RandomWeights(0.7), 512), skip=skip))
    assert (ours - theirs).abs().max() < 0.15


def test_one_sublayer_less_is_another_model() -> None:
    model = target("llama")
    scores = [prompt_scores(ShorterModel(model, skip=frozenset({item}))) for item in ((1, "attn"), (1, "mlp"))]
    assert not torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], prompt_scores(model))


def test_four_bit_blocks_are_what_a_gguf_reader_reads() -> None:
    matrix = np.random.default_rng(0).normal(size=(16, 96)).astype(np.float32)
    matrix[3, :32] = 0.25
    read = dequantize(four_bit_blocks(matrix), "Q4_1", matrix.shape).numpy()
    span = matrix.reshape(16, 3, 32).max(2) - matrix.reshape(16, 3, 32).min(2)
    assert (np.abs(read - matrix).reshape(16, 3, 32).max(2) <= span / 15 * 0.51 + 4e-3).all()
    rounded = LowBitWeights(Fixed(matrix), 4).take("x.weight", matrix.shape).numpy()
    assert np.abs(rounded - read).max() < 1e-6


class Fixed:
    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = torch.from_numpy(matrix)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._matrix

    def has(self, name: str) -> bool:
        return True


@pytest.mark.parametrize("bits, most", [(8, 0.01), (4, 0.12)])
def test_rounded_weights_are_close_and_vectors_untouched(bits: int, most: float) -> None:
    rounded, exact = LowBitWeights(RandomWeights(), bits), RandomWeights()
    name = "model.layers.0.mlp.down_proj.weight"
    a, b = rounded.take(name, (64, 96)), exact.take(name, (64, 96))
    assert 0.0 < float((a - b).norm() / b.norm()) < most
    assert torch.equal(rounded.take("model.norm.weight", (64,)), exact.take("model.norm.weight", (64,)))
    assert (rounded.blocks(name, (64, 96)) is None) == (bits == 8)


@needs_native
def test_a_native_decoder_knows_its_bits() -> None:
    assert NativeDecoder(shape("llama"), RandomWeights(), 64, threads=1).bits == 8
    rounded = LowBitWeights(RandomWeights(), 4)
    assert NativeDecoder(shape("llama"), rounded, 64, threads=1, keep_blocks=True).bits == 4
    assert NativeDecoder(shape("llama"), rounded, 64, threads=1).bits == 8


@pytest.mark.parametrize("layers", [3, 4, 12, 30, 80])
def test_the_default_skips_a_run_of_layers_in_the_middle_and_neither_end(layers: int) -> None:
    skipped = sorted({layer for layer, _ in default_skip(layers)})
    assert len(default_skip(layers)) == 2 * len(skipped)
    assert 0 not in skipped and layers - 1 not in skipped
    assert len(skipped) == max(1, round(0.2 * (layers - 2)))
    assert skipped == list(range(skipped[0], skipped[-1] + 1))
    assert abs((skipped[0] - 1) - (layers - 2 - skipped[-1])) <= 1
    assert default_skip(layers, 1.0) == read_skip(list(range(1, layers - 1)), layers)
    assert read_skip(["attn.1", "mlp.1"], layers) == read_skip([1], layers)


@pytest.mark.parametrize("parents, lead", [
    ([], 0), ([-1], 1), ([-1, 0, 1], 3), ([-1, -1], 0), ([-1, 0, 0], 1), ([-1, 0, 1, 1, 3], 2),
    ([-1, 0, 1, 2, 1, -1], 0)])
def test_the_part_of_a_tree_that_is_read_once(parents: list[int], lead: int) -> None:
    assert _lead(parents) == lead


def words(*tokens: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return Tokenizer(Backend(backend_models.WordLevel(vocabulary, unk_token=tokens[0])))


def loaded(tokenizer: Tokenizer | None, kind: str = "llama") -> LoadedModel:
    return LoadedModel(target(kind), tokenizer, ReferenceKernels())


def test_vocabularies_are_compared_token_by_token() -> None:
    check_same_vocabulary(loaded(words("a", "b", "c")), loaded(words("a", "b", "c")), "x")
    check_same_vocabulary(loaded(None), loaded(None), "x")
    for theirs, reason in ((words("a", "c", "b"), "id 1 is 'b' for the target and 'c' for it"),
                           (words("a", "b"), "id 2 is 'c' for the target and None for it"),
                           (words("a", "b", "c", "d"), "id 3 is None for the target and 'd' for it"),
                           (None, "no tokenizer")):
        with pytest.raises(RequestError, match=reason):
            check_same_vocabulary(loaded(words("a", "b", "c")), loaded(theirs), "x")


@pytest.mark.real_model
def test_the_default_model_drafts_for_itself(default_model_path: Path) -> None:
    """The file as its own draft model; skipped, cut short, in 4 bits."""
    llm = LLM(threads=1)
    prompt = "The three largest oceans are"
    params = SamplingParams(max_tokens=12, temperature=0.0)
    plain = llm.generate([prompt], params)[0].outputs[0].token_ids
    for wish, least in (({"method": "draft", "model": str(default_model_path)}, 4.0), ({"method": "skip"}, 1.0),
                        ({"method": "exit", "layers": 20}, 1.0), ({"method": "precision"}, 2.5)):
        out = llm.generate([prompt], params, speculation=wish | {"k": 4, "adaptive": False})[0]
        assert out.outputs[0].token_ids == plain and out.speculation.failure is None
        assert out.speculation.mean_accepted_length >= least


@pytest.mark.real_model
def test_what_has_4_bits_is_not_rounded_further() -> None:
    with pytest.raises(RequestError, match="4 bits already"):
        LLM(threads=1, quantization="blocks").generate(["The"], SamplingParams(max_tokens=2), speculation="precision")


def test_the_skip_bench_ranks_lists_by_what_they_promise() -> None:
    lists = candidates(30)
    assert lists["inner_20"] == sorted({layer for layer, _ in default_skip(30)})
    assert all(0 not in skip and 29 not in skip for skip in lists.values())
    assert forecast([0.8, 0.64], 0.1) == pytest.approx(2.44 / 1.2)
    assert forecast([0.1, 0.0], 0.9) == pytest.approx(1.1 / 1.9)
    llm = tiny_llm(target("llama"), words(*(f"w{i}" for i in range(VOCAB))))
    rows = measure(llm, {"one": [1], "both": [1, 2]}, ["w1 w2 w3"], max_tokens=6)
    assert {row.case for row in rows} == {"one", "both"} and rows[0].paceline >= rows[1].paceline > 0.0


@pytest.mark.parametrize(("wish", "words"), [
    ({"method": "exit", "verify": "rejection", "branches": 2}, "verifies chains"),
    ({"method": "skip", "verify": "multi-round", "min_confidence": 0.5}, "bends the text")])
def test_what_a_rule_cannot_take_is_refused_at_admission(wish: dict[str, Any], words: str) -> None:
    llm = drafting_llm()
    with pytest.raises(RequestError, match=words):
        llm.engine.add([1, 2, 3], SamplingParams(), speculation=wish)
