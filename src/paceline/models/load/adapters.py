"""A PEFT adapter's folder: adapter_config.json and adapter_model.safetensors, read and checked by themselves."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.fields import Fields, pattern, shown
from paceline.models.load.reading import read_object, reading
from paceline.models.load.resolve import resolve
from paceline.models.load.safetensors_folder import FLOAT_TYPES

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT's wrapper before the model's own module names."""
ALL_LINEAR = "all-linear"
HEADS = frozenset({"lm_head", "embed_out"})
"""What is not meant by all-linear."""
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern",
                  "alpha_pattern", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"})
HARMLESS = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    # PEFT stores both factors the same way round for weights that lie transposed: only merging has to know.
    "fan_in_fan_out"})
"""What training or merging needed to know; applying the adapter does not."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that take a part out of the base model's weights: the adapter alone is then not the whole change."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What one linear layer gets: y += scale * B (A x)."""

    a: torch.Tensor
    """[r, inputs] float32."""
    b: torch.Tensor
    """[outputs, r] float32."""
    scale: float


@dataclass(frozen=True, slots=True)
class Targets:
    """Which modules an adapter says it is for, as PEFT reads it."""

    modules: tuple[str, ...] | str
    exclude: tuple[str, ...] | str = ()
    layers: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()

    def take(self, module: str) -> bool:
        if self.exclude and _named(self.exclude, module):
            return False
        if isinstance(self.modules, str) and self.modules.lower() == ALL_LINEAR:
            return module.rpartition(".")[2] not in HEADS
        if not _named(self.modules, module):
            return False
        whole = isinstance(self.modules, str) or module in self.modules
        return whole or not self.layers or self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_pattern] or [r".*?\.[^.]*"]
        found = next((match for pattern in patterns if (match := re.match(rf"{pattern}\.(\d+)\.", module))), None)
        return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter as its files hold it; whether it fits a model is found out when it meets one."""

    path: Path
    revision: str
    """Identity of the contents."""
    targets: Targets
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    """By the name of the module in the model."""


def read_adapter(path: str | Path) -> PeftAdapter:
    """`path`: a folder, or a hub id. What cannot be applied as it was trained is refused by name."""
    folder = resolve(path)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            kept = " (pickled .bin weights are not read)" if (folder / "adapter_model.bin").exists() else ""
            raise ModelNotFoundError(f"{folder} has no {name}{kept}: give the folder of a PEFT adapter.")
    config = read_object(folder / CONFIG)
    _check_kind(folder, config)
    targets = _targets(folder, config)
    tensors = _tensors(folder / TENSORS)
    pairs: dict[str, Pair] = {}
    for module in dict.fromkeys(name.rpartition(".lora_")[0] for name in tensors):
        pairs[module] = _pair(folder, config, module, tensors)
    astray = sorted(module for module in pairs if not targets.take(module))
    if astray:
        raise ModelFormatError(f"{folder}: target_modules does not name {_some(astray)}, for which there are tensors: "
                               "config and tensors do not belong together.")
    return PeftAdapter(folder, _revision(folder, config), targets, pairs)


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    where = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise ModelFormatError(f"{where}: peft_type {shown(config.get('peft_type'))} is not supported; LORA is.")
    if config.get("bias", "none") != "none":
        raise ModelFormatError(f"{where}: bias {shown(config['bias'])} (trained biases) is not supported; 'none' is.")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(CHANGED_BASE):
        raise ModelFormatError(f"{where}: init_lora_weights {initial!r} changes the base model's weights as well: save "
                               "the adapter as plain LoRA (PEFT's path_initial_model_for_weight_conversion).")
    asked = sorted(key for key, value in config.items() if value and key not in READ | HARMLESS)
    if asked:
        raise ModelFormatError(f"{where} sets {_some(asked)}, which this version does not apply: train a plain LoRA, "
                               "or merge the adapter into the model.")


def _targets(folder: Path, config: Mapping[str, Any]) -> Targets:
    def texts(key: str) -> tuple[str, ...] | str:
        value = config.get(key)
        if value is None or isinstance(value, str):
            return value or ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelFormatError(f"{folder / CONFIG}: {key} must be a text or a list of texts, got {shown(value)}.")
        return tuple(value)

    layers, names = config.get("layers_to_transform"), texts("layers_pattern")
    read = Fields({"layers_to_transform": [layers]} if isinstance(layers, int) else config, str(folder / CONFIG))
    modules = texts("target_modules")
    if not modules:
        raise ModelFormatError(f"{folder / CONFIG} has no target_modules: nobody can tell what the adapter is for.")
    names = (names,) if isinstance(names, str) else names
    for value in (modules, texts("exclude_modules"), *names):
        if isinstance(value, str):
            pattern(value, read.where)
    return Targets(modules, texts("exclude_modules"), read.counts("layers_to_transform") or (), names)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """By module and factor ("model.layers.0.self_attn.q_proj.lora_A"), in float32."""
    found: dict[str, torch.Tensor] = {}
    foreign: list[str] = []
    with reading(path), safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open objects are not iterable
            short = name.removeprefix(PREFIX).removesuffix(".weight")
            if not name.startswith(PREFIX) or not short.endswith((".lora_A", ".lora_B")):
                foreign.append(name)
                continue
            stored = str(file.get_slice(name).get_dtype())
            if stored not in FLOAT_TYPES:
                raise ModelFormatError(f"tensor '{name}' in {path} is stored as {stored}; adapters are read in "
                                       f"{', '.join(FLOAT_TYPES)}.")
            found[short] = file.get_tensor(name).float()
            if not bool(found[short].isfinite().all()):
                raise ModelFormatError(f"tensor '{name}' in {path} holds values that are no finite numbers.")
    if foreign:
        raise ModelFormatError(f"{path} holds {_some(foreign)}, which are no low-rank factors of linear layers "
                               "(embeddings, whole modules, biases and magnitudes are not supported): train a plain "
                               "LoRA, save it with save_embedding_layers=False if those are the model's own, or merge "
                               "the adapter into the model.")
    if not found:
        raise ModelFormatError(f"{path} holds no tensors: there is nothing to apply.")
    return found


def _pair(folder: Path, config: Mapping[str, Any], module: str, tensors: Mapping[str, torch.Tensor]) -> Pair:
    a, b = tensors.get(f"{module}.lora_A"), tensors.get(f"{module}.lora_B")
    if a is None or b is None:
        raise ModelFormatError(f"{folder / TENSORS} has only one of the two factors of '{module}': download it again.")
    rank = _number(folder, config, "r", "rank_pattern", module, 8)
    alpha = _number(folder, config, "lora_alpha", "alpha_pattern", module, 8)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ModelFormatError(f"{folder}: the factors of '{module}' have shapes {list(a.shape)} and {list(b.shape)}, "
                               f"but the config says rank {rank:g}: config and tensors do not belong together.")
    return Pair(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _number(folder: Path, config: Mapping[str, Any], key: str, patterns: str, module: str, default: int) -> float:
    """A module's own value: that of the first pattern that names it, else the adapter's."""
    read = Fields(config, str(folder / CONFIG))
    value = read.get(key, default)
    for name, own in read.mapping(patterns).items():
        pattern(name, read.where)
        if re.match(rf"(.*\.)?({name})$", module):
            value = own
            break
    key = f"{key} of '{module}'"
    return Fields({key: value}, read.where).positive(key)


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    """A text is a pattern of the whole name; a list holds names, or ends of names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def _revision(folder: Path, config: Mapping[str, Any]) -> str:
    """Of every byte: adapters are small, and two trained from one file differ anywhere."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (folder / TENSORS).open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return "sha256:" + digest.hexdigest()[:32]


def _some(names: list[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(f"'{name}'" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
