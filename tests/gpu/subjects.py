"""Whose tokens the equality matrix compares: a small model of random weights or a real one, and engines around it."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.config import EngineOptions
from paceline.engine.build import DTYPES, choose_device, engine_for
from paceline.engine.drafting.models import LoadedModel
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.interface import CausalLM
from paceline.models.registry import build
from truth import questions

LOADED, SMALL = "same", "small"
"""Names under which an engine finds draft models: the target once more, and a random model of one layer."""
SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


class NamedWeights:
    """WeightSource: every tensor filled from its own name, so that it is the same whenever it is taken. Large enough
    that the next token depends on the whole context."""

    def __init__(self, device: torch.device, dtype: torch.dtype, salt: str = "", gain: float = 1.5) -> None:
        self._device = device
        self._dtype = dtype
        self._salt = salt
        self._gain = gain

    def has(self, name: str) -> bool:
        return name != "lm_head.weight"

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256((self._salt + name).encode()).digest()[:7], "little")
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        values = 1.0 + 0.1 * values if len(shape) == 1 else values * (self._gain / shape[-1] ** 0.5)
        return values.to(self._device, dtype or self._dtype)


class WeightsAgain:
    """ModelSource of a random model: what `precision` rounds."""

    threads = 1

    def __init__(self, source: NamedWeights) -> None:
        self._source = source

    @contextmanager
    def weights(self) -> Iterator[NamedWeights]:
        yield self._source

    def load(self, name: str, max_model_len: int) -> LoadedModel:
        raise ConfigError(f"No model {name!r} here.")


@dataclass(frozen=True)
class Subject(ABC):
    """A model, of which engines with any options can be had."""

    name: str
    model: CausalLM
    device: torch.device
    dtype: torch.dtype
    source: Any
    more: dict[str, CausalLM] = field(default_factory=dict)
    """Draft models by name."""
    tokenizer: Any = None
    kv_dtype: str = "auto"

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def llm(self, **options: Any) -> LLM:
        raw = {"deterministic": True, "kernels": "triton", "max_num_seqs": 64, "kv_dtype": self.kv_dtype} | options
        engine = engine_for(self.model, self.tokenizer, EngineOptions.of(**raw), device=self.device, dtype=self.dtype,
                            revision=self.name, source=self.source)
        cache = engine.runner.storage.dtype
        for name, model in self.more.items():
            engine.draft_models.add(name, LoadedModel(model, self.tokenizer, engine.kernels, cache))
        return LLM.from_engine(engine)

    def can(self, wish: str) -> bool:
        """Whether there is what a drafter of the matrix needs."""
        return wish != "draft small" or SMALL in self.more

    @abstractmethod
    def prompt(self, seed: int) -> list[int]: ...


@dataclass(frozen=True)
class RandomSubject(Subject):
    """Random weights. Of its prompts every other one repeats itself, so that look-ups find something."""

    @staticmethod
    def small(device: str, dtype: str, **changes: Any) -> RandomSubject:
        """`changes`: to the shape."""
        where, number = choose_device(device), DTYPES[dtype]
        shape = SHAPE | changes
        source = NamedWeights(where, number)
        longest = shape["max_position_embeddings"]
        model = build(ModelConfig.from_dict(shape), source, longest)
        small = build(ModelConfig.from_dict(shape | {"num_hidden_layers": 1}),
                      NamedWeights(where, number, "other"), longest)
        return RandomSubject("random weights", model, where, number, WeightsAgain(source),
                             {LOADED: model, SMALL: small})

    def prompt(self, seed: int) -> list[int]:
        luck = random.Random(seed)
        length = luck.randrange(5, 70)
        period = luck.randrange(1, 7) if seed % 2 else length
        own = [luck.randrange(self.vocab_size) for _ in range(period)]
        return [own[at % period] for at in range(length)]


@dataclass(frozen=True)
class RealSubject(Subject):
    """A model with its tokenizer, on questions."""

    prompts: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(llm: LLM) -> RealSubject:
        """The model of an engine, which is not needed any more."""
        engine = llm.engine
        storage = engine.runner.storage
        found = tuple(tuple(prompt) for prompt in questions(llm, 50))
        return RealSubject(engine.revision, engine.model, storage.device, storage.dtype, engine.draft_models.source,
                           {LOADED: engine.model}, engine.tokenizer, prompts=found)

    def prompt(self, seed: int) -> list[int]:
        return list(self.prompts[seed % len(self.prompts)])
