"""Engines around tiny models that can draft with models, and a look at what their drafters propose."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from engine.tiny import BASE, SHAPES, VOCAB, RandomWeights, tiny_llm
from paceline import SamplingParams
from paceline.engine.drafting.models import LoadedModel
from paceline.kernels import cpu
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.native import NativeDecoder
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.speculation import spec as speculations
from paceline.speculation.tree import DraftTree

FAST = "llama" if cpu.load() is None else "native"
"""The kind of target that says the same in less time."""
PROMPT = [(i * 31 + 7) % VOCAB for i in range(75)]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 4}
METHODS: dict[str, dict[str, Any]] = {
    "draft, same weights": {"method": "draft", "model": "same"},
    "draft, other weights": {"method": "draft", "model": "other"},
    "draft, siblings": {"method": "draft", "model": "same", "branches": 3},
    "draft, full tree": {"method": "draft", "model": "other", "branches": [2, 2, 1]},
    "draft, dynamic tree": {"method": "draft", "model": "same", "tree": True, "top_k": 2},
    "draft, late tree": {"method": "draft", "model": "same", "branches": [1, 1, 3, 1]},
    "skip": {"method": "skip"},
    "skip, full tree": {"method": "skip", "branches": [2, 1, 2]},
    "exit": {"method": "exit"},
    "exit, all but one": {"method": "exit", "layers": 3, "branches": 2},
    "precision": {"method": "precision", "bits": 4},
    "cascade": {"method": "cascade", "drafter": "exit", "by": {"method": "draft", "model": "same"}, "small_k": 2},
    "cascade on one cache": {"method": "cascade", "drafter": {"method": "exit", "branches": [2, 2]},
                             "by": {"method": "skip", "skip": [1]}, "small_k": 3},
    "cascade of cascade": {
        "method": "cascade", "drafter": {"method": "cascade", "drafter": "ngram", "by": {"method": "exit"}},
        "by": {"method": "draft", "model": "same"}, "small_k": 3},
    "merge of models": {"method": "merge", "drafters": ["exit", {"method": "skip", "branches": 2},
                                                        {"method": "draft", "model": "same"}]},
    "cascade of ngram": {"method": "cascade", "drafter": "ngram", "by": {"method": "exit", "layers": 3}},
}


NATIVE_CACHES = {"native": torch.float32, "native int8": torch.int8}


class OtherWeights(RandomWeights):
    """As many numbers, all of them others."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().take(name, shape, dtype) if name.endswith("norm.weight") else super().take("x" + name, shape)


class WeightsAgain:
    """Where the engine finds the target's weights once more."""

    threads = 1

    @contextlib.contextmanager
    def weights(self) -> Iterator[RandomWeights]:
        yield RandomWeights()

    def load(self, name: str, max_model_len: int) -> LoadedModel:
        raise FileNotFoundError(name)


@functools.cache
def shape(name: str) -> ModelConfig:
    return ModelConfig.from_dict(BASE | WIDE | SHAPES[name])


@functools.cache
def target(kind: str) -> Any:
    """"native", "native int8" (its cache, as the engine has it by default), or the name of an architecture that runs in
    torch."""
    if kind in NATIVE_CACHES:
        return NativeDecoder(shape("llama"), RandomWeights(), 512, threads=1, kv_dtype=NATIVE_CACHES[kind])
    return build(shape(kind), RandomWeights(), 512)


@functools.cache
def draft_model(weights: str, kind: str) -> LoadedModel:
    source = RandomWeights() if weights == "same" else OtherWeights()
    if kind in NATIVE_CACHES:
        dtype = NATIVE_CACHES[kind]
        return LoadedModel(NativeDecoder(shape("llama"), source, 512, threads=1, kv_dtype=dtype), None,
                           NativeKernels(), dtype)
    return LoadedModel(build(shape("llama"), source, 512), None, ReferenceKernels())


def drafting_llm(kind: str = FAST, tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
    llm = tiny_llm(target(kind), tokenizer, **options)
    for name in ("same", "other"):
        drafting = draft_model(name, kind if kind in NATIVE_CACHES else "torch")
        llm.engine.draft_models.add(name, replace(drafting, tokenizer=tokenizer))
    llm.engine.draft_models.source = WeightsAgain()
    return llm


class Watch:
    """Keeps what a wish's drafter proposes. The engine shares one object among all requests with the same wish, as
    long as somebody holds it; this does."""

    def __init__(self, llm: LLM, wish: dict[str, Any]) -> None:
        parsed = speculations.parse(wish)
        assert parsed is not None
        self.drafter: Any = speculations.build(parsed, llm.engine._draft_context)
        self.proposals: list[tuple[list[int], DraftTree | None]] = []
        """The tokens of the sequence, and the tree."""
        self.params: list[SamplingParams] = []
        """Of the request that each proposal was for."""
        propose = self.drafter.propose

        def watched(sequences: Any, budgets: Any) -> list[DraftTree | None]:
            trees: list[DraftTree | None] = propose(sequences, budgets)
            self.proposals += [(list(seq.tokens), tree) for seq, tree in zip(sequences, trees)]
            self.params += [seq.request.params for seq in sequences]
            return trees

        self.drafter.propose = watched
