"""write_head(): a folder in the speculators format, there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats import speculators
from paceline.models.heads.tensors import MAPS, check, target_ids
from paceline.models.load.safetensors_folder import SINGLE

STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float16}
"""Types of storage, and what tensors that are no matrices have in them."""
IN_GROUPS = ("fc",)
"""Reads streams of very different sizes side by side, so that a row holds weights of very different sizes, and the
smallest are multiplied by the largest: with one scale for all of them they would be lost."""
GROUP = 16
"""Columns that share a scale there, those of like size together."""
SCALES = torch.bfloat16
"""They need the range of float32. What the fewer bits round away, the codes make up for."""
LARGEST = 127


def write_head(folder: str | Path, config: HeadConfig, tensors: Mapping[str, torch.Tensor], *,
               storage: str = "float16", replace: bool = False) -> None:
    """Writes config.json and model.safetensors to a folder beside `folder`, then renames it: who reads `folder` never
    sees half a head. storage: float32, bfloat16, float16, or int8, where every matrix becomes codes (`<name>` int8)
    with a scale per row (`<name>_scale` [rows, 1]) or, in `fc`, per group (`<name>_scale` [rows, groups], and each
    column's group in `<name>_g_idx`), as compressed-tensors has them. replace: `folder` may be there already."""
    path = Path(folder)
    if storage not in STORAGE:
        raise ConfigError(f"A draft head is stored as {', '.join(STORAGE)}, not as {storage!r}.")
    if path.exists() and not replace:
        raise ConfigError(f"{path} is there already: name another folder, or remove it.")
    if config.target_layer:
        raise ConfigError("An MTP layer of the target's own kind stays in the target's checkpoint: the speculators "
                          "format has no words for it.")
    check(config, tensors, "this head")
    stored: dict[str, torch.Tensor] = {}
    in_floats: list[str] = []
    in_groups: list[str] = []
    for name, tensor in tensors.items():
        if name in MAPS:
            continue
        plain, module = tensor.detach().cpu(), name.removesuffix(".weight")
        grouped = module in IN_GROUPS
        if storage != "int8" or not _is_matrix(name, plain) or (grouped and plain.shape[1] % GROUP):
            stored[name] = plain.to(STORAGE[storage]).contiguous().clone()
            if name.endswith(".weight") and plain.dim() == 2:
                in_floats.append(module)
        elif grouped:
            stored[name], stored[f"{name}_scale"], stored[f"{name}_g_idx"] = rounded_in_groups(plain)
            in_groups.append(module)
        else:
            stored[name], stored[f"{name}_scale"] = rounded(plain)
    if config.reduced:
        d2t = tensors["d2t"].cpu().to(torch.int64)
        stored["d2t"] = _narrowed(d2t) if storage == "int8" else d2t.clone()
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        stored["t2d"][target_ids(config, d2t, "this head")] = True
    raw = speculators.write(config) | {"torch_dtype": str(STORAGE[storage]).removeprefix("torch.")}
    if storage == "int8":
        raw["quantization_config"] = _quantization(in_floats, in_groups)
    _write(path, raw, stored)


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, columns] and scales [rows, 1]: a row's largest value becomes 127."""
    wide = matrix.float()
    scale = _scales(wide.abs().amax(1, keepdim=True))
    return _codes(wide, scale), scale


def rounded_in_groups(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 [rows, columns], scales [rows, groups], and int32 [columns]: the group of each. Columns are in groups by
    their size: neighbours may be of very different ones."""
    wide = matrix.float()
    order = wide.square().mean(0).argsort(stable=True)
    group_of = torch.empty_like(order)
    group_of[order] = torch.arange(len(order)) // GROUP
    scale = _scales(wide[:, order].abs().reshape(len(wide), -1, GROUP).amax(2))
    return _codes(wide, scale[:, group_of]), scale, group_of.to(torch.int32)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    return (largest / LARGEST).to(SCALES)


def _codes(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By the scales as they are stored."""
    return (wide / scale.float().where(scale > 0, 1)).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def _narrowed(integers: torch.Tensor) -> torch.Tensor:
    """In the smallest type that holds them all."""
    for kind in (torch.int8, torch.int16, torch.int32):
        if torch.equal(integers.to(kind).to(integers.dtype), integers):
            return integers.to(kind)
    return integers.clone()


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and tensor.shape[0] > 1


def _quantization(in_floats: list[str], in_groups: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    schemes = [(["Linear"], weights)]
    if in_groups:  # by its name, which counts for more than what it is
        schemes.append((in_groups, weights | {"strategy": "group", "group_size": GROUP, "actorder": "group"}))
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": in_floats,
            "quantization_status": "compressed",
            "config_groups": {f"group_{place}": {"targets": targets, "weights": scheme, "input_activations": None}
                              for place, (targets, scheme) in enumerate(schemes)}}


def _write(path: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"Cannot write to {path.parent}: {error.strerror}; name another folder.") from None
    try:
        save_file(tensors, new / SINGLE, metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for made, most in ((new, 0o777), (new / SINGLE, 0o666)):  # both are made for their owner alone
            made.chmod(most & ~_umask())
        _synced(new)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            os.replace(path, old / "old")
            try:
                os.replace(new, path)
            except OSError:
                os.replace(old / "old", path)
                raise
            finally:
                shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(new, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}; nothing was left "
                          "there.") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _synced(folder: Path) -> None:
    """On the disk before it gets its name."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
