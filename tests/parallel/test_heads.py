"""Trained heads beside a model that several ranks hold: they run on rank 0, and draft as beside one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import SamplingParams
from paceline.config import EngineOptions
from paceline.engine.build import build_model, engine_for
from paceline.engine.parallel.together import together
from paceline.engine.trained_heads import load_heads
from paceline.kernels.reference import ReferenceKernels
from paceline.llm import LLM
from paceline.models.interface import CausalLM
from paceline.models.load.opening import open_checkpoint
from paceline.models.shard import WHOLE, Shard
from paceline.models.tokenizer import Tokenizer

FAMILY = Path(__file__).parents[1] / "family"
CPU = torch.device("cpu")
OPTIONS = EngineOptions(deterministic=True, kernels="reference", kv_blocks=200, max_model_len=256)
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good"


def llm_of(model: CausalLM, kind: str) -> LLM:
    with open_checkpoint(FAMILY / "target") as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    heads = load_heads({kind: FAMILY / kind}, model, tokenizer, OPTIONS)
    return LLM.from_engine(engine_for(model, tokenizer, OPTIONS, device=CPU, heads=heads))


def share(shard: Shard) -> CausalLM:
    with open_checkpoint(FAMILY / "target") as checkpoint:
        return build_model(OPTIONS, checkpoint, CPU, torch.float32, 256, shard)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "medusa", "mtp"])
def test_heads_draft_the_same(kind: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    wish = {"method": kind, "head": kind, "k": 4, "adaptive": False}
    one, two = (llm_of(model, kind).generate([PROMPT], params, speculation=wish)[0]
                for model in (share(WHOLE), together(2, share, ReferenceKernels, CPU)))
    assert two.error is None and one.outputs[0].token_ids == two.outputs[0].token_ids
    assert one.speculation is not None and two.speculation is not None
    assert (one.speculation.drafted, one.speculation.accepted) == (two.speculation.drafted, two.speculation.accepted)
    assert two.speculation.accepted > 0
