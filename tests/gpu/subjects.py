"""Whose tokens the equality matrix compares: a small model of random weights, a tiny one with trained heads or a real
one, and engines around it."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from made import random_head
from paceline.config import EngineOptions
from paceline.engine.build import DTYPES, ModelFiles, build_model, choose_device, engine_for, load_heads
from paceline.engine.drafting.models import LoadedModel
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.heads.interface import Head
from paceline.models.interface import CausalLM
from paceline.models.load.adapters import Pair, PeftAdapter, Targets
from paceline.models.load.opening import open_checkpoint
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.speculation.spec import HEADS
from truth import questions

UNTRAINED = ("eagle1", "dflash")
"""Kinds of heads that the tiny family has none of."""
LOADED, SMALL = "same", "small"
"""Names under which an engine finds draft models: the target once more, and a model of one layer."""
SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


OPENINGS = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of",
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his",
    "The captain looked at the sea for a long time, and at last he said to the men that the whale",
    "My dear Mr. Bennet, said his lady to him one day, have you heard that")
"""What the tiny family has read begins like this, or could."""


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


def random_adapter(name: str, model: Any, rank: int = 8, scale: float = 0.3) -> PeftAdapter:
    """For every linear layer but the head."""
    luck = NamedWeights(torch.device("cpu"), torch.float32, name)
    pairs = {module.name: Pair(luck.take(f"{module.name} a", (rank, linear.weight.shape[1])),
                               luck.take(f"{module.name} b", (module.size, rank)), scale)
             for linear in model.linears() for module in linear.modules if module.name != "lm_head"}
    return PeftAdapter(Path(name), name, Targets("all-linear"), pairs)


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
    kernels: str = "triton"
    heads: dict[str, Head] = field(default_factory=dict)
    """Trained heads by their kind."""
    untrained: frozenset[str] = frozenset()
    """Those of the heads that have learned nothing: their drafts need not be right."""
    adapter_scale: float = 0.3
    """Of what a random adapter adds: it is to change texts, and leave a trained model one that foresees something."""

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def adapts(self) -> bool:
        """Whether requests may have adapters."""
        return not self.model.self_contained

    def llm(self, **options: Any) -> LLM:
        raw = {"deterministic": True, "kernels": self.kernels, "max_num_seqs": 64, "kv_dtype": self.kv_dtype} | options
        engine = engine_for(self.model, self.tokenizer, EngineOptions.of(**raw), device=self.device, dtype=self.dtype,
                            revision=self.name, source=self.source, heads=self.heads)
        cache = engine.runner.storage.dtype
        for name, model in self.more.items():
            engine.draft_models.add(name, LoadedModel(model, self.tokenizer, engine.kernels, cache))
        return LLM.from_engine(engine)

    def lacks(self, wish: Any) -> str | None:
        """What a wish of the matrix needs and nobody has here: the heads and models that it names, wherever it does,
        and bits to leave out."""
        if isinstance(wish, dict):
            if wish.get("method") == "draft" and wish.get("model") not in self.more:
                return f"no draft model {wish.get('model')!r}"
            if wish.get("method") == "precision" and self.model.bits <= wish.get("bits", 0):
                return f"weights of {self.model.bits} bits, and drafts in {wish.get('bits')} are asked for"
            wish = list(wish.values())
        if isinstance(wish, list):
            return next((found for part in wish if (found := self.lacks(part)) is not None), None)
        return f"no trained head {wish!r}" if wish in HEADS and wish not in self.heads else None

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


@dataclass(frozen=True)
class FamilySubject(Subject):
    """A tiny model that has read some books, with a draft model and heads trained for it (tools/tiny_family.py), and
    random heads of the other kinds."""

    @staticmethod
    def of(folder: Path, device: str, dtype: str, kernels: str = "triton", kv_dtype: str = "auto",
           adapts: bool = True, target: Path | None = None) -> FamilySubject:
        """`adapts`: requests may have adapters, for which native code leaves the layers to torch. `target`: the same
        in few bits."""
        where, number = choose_device(device), DTYPES[dtype]
        options = EngineOptions.of(deterministic=True, kernels=kernels, kv_dtype=kv_dtype, threads=1,
                                   adapters={} if adapts else None)
        target = target or folder / "target"
        found: dict[str, CausalLM] = {}
        for name, place in {"target": target, "draft": folder / "draft"}.items():
            with open_checkpoint(place) as checkpoint:
                found[name] = build_model(options, checkpoint, where, number, None)
                tokenizer = Tokenizer.from_checkpoint(checkpoint)
        model = found["target"]
        heads = load_heads({kind: folder / kind for kind in HEADS if (folder / kind).is_dir()}, model, tokenizer,
                           options)
        others = {kind: random_head(kind, model) for kind in UNTRAINED if kind not in heads}
        return FamilySubject("tiny family" if target == folder / "target" else f"tiny family, {target.name}",
                             model, where, number, ModelFiles(options, target, where, number),
                             {LOADED: model, SMALL: found["draft"]}, tokenizer, kv_dtype, kernels, heads | others,
                             frozenset(others), 0.05)

    def prompt(self, seed: int) -> list[int]:
        tokens = self.tokenizer.encode(OPENINGS[seed % len(OPENINGS)], add_special=False)
        return list(tokens[:max(8, len(tokens) - seed % 7)])
