"""Adapters on the native path: torch runs the model on native kernels, weights in 8 bits, additions in floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_folder
from serving import Recorder

from adapters.adapter_files import ATTENTION, MLP, MergedWeights, factors, shapes_of, write_adapter
from engine.test_equality_matrix import PROMPT, strangers
from engine.tiny import BASE, SHAPES, tiny_llm
from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.kernels import cpu
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.native import NativeDecoder
from paceline.models.registry import build

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
WIDE: dict[str, Any] = BASE | SHAPES["llama"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CALM = 0.7


class CalmRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self._gain = CALM


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A model's folder, an adapter's, and the adapter's tensors."""
    folder, recorder = tmp_path_factory.mktemp("native"), CalmRecorder()
    model = build(ModelConfig.from_dict(WIDE), recorder, 512)
    write_folder(folder / "model", WIDE, [{name: own.contiguous() for name, own in recorder.taken.items()}])
    tensors = {name: own * 0.5 for name, own in factors(shapes_of(model, ATTENTION + MLP), "native").items()}
    return folder / "model", write_adapter(folder / "adapter", tensors), tensors


def native_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), kernels="native", threads=1, kv_blocks=200, **options)


def test_an_engine_made_without_adapters_refuses_them(files: Any) -> None:
    llm = native_llm(files[0])
    assert isinstance(llm.engine.model, NativeDecoder)
    with pytest.raises(ConfigError, match=r"adapters=\{\}"):
        llm.load_adapter("own", str(files[1]))
    llm = native_llm(files[0], adapters={})
    assert isinstance(llm.engine.model, Decoder)
    llm.load_adapter("own", str(files[1]))


def test_bits_do_not_depend_on_the_company(files: Any) -> None:
    llm = native_llm(files[0], adapters={"own": str(files[1])})
    assert llm.engine.kernels.name == "native" and llm.engine.model.bits == 8
    params = SamplingParams(max_tokens=12, seed=4, logprobs=0)
    alone = [native_llm(files[0], adapters={"own": str(files[1])}).generate([PROMPT], params, adapter=adapter)[0]
             for adapter in (None, "own")]
    assert alone[0].outputs[0].token_ids != alone[1].outputs[0].token_ids
    prompts, theirs = strangers(6)
    outs = llm.generate([*prompts, PROMPT, PROMPT], [*theirs, params, params],
                        adapter=[None, "own"] * 3 + [None, "own"])[-2:]
    for got, want in zip(outs, alone):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert [entry.raw for entry in got.outputs[0].logprobs] == [entry.raw for entry in want.outputs[0].logprobs]


def test_scores_are_those_of_merged_weights_up_to_the_rounding(files: Any) -> None:
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    merged = MergedWeights(files[2])
    merged._gain = CALM
    want, base, got = (llm.generate([PROMPT], score, adapter=adapter)[0].prompt_logprobs for llm, adapter in (
        (tiny_llm(build(ModelConfig.from_dict(WIDE), merged, 512)), None),
        (native_llm(files[0], adapters={"own": str(files[1])}), None),
        (native_llm(files[0], adapters={"own": str(files[1])}), "own")))
    gaps, without = (torch.tensor([abs(a.raw - b.raw) for a, b in zip(want[1:], own[1:])]) for own in (got, base))
    assert gaps.mean() < 0.02 < without.mean(), (gaps.mean(), without.mean())
