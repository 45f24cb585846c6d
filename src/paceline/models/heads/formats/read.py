"""read_head(): which format a head's folder has, and that one read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats import mtp, official, speculators
from paceline.models.heads.formats.files import Tensors, read_tensors
from paceline.models.heads.interface import Head
from paceline.models.heads.target import Target
from paceline.models.heads.tensors import check
from paceline.models.load.reading import read_object

USELESS = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Ends of names under which training leaves what is the target's, or can be computed."""


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head as read: its tensors are complete, of the right shapes, and under one set of names."""

    config: HeadConfig
    tensors: Mapping[str, torch.Tensor]
    where: str


def read_head(folder: str | Path, target: ModelConfig) -> HeadCheckpoint:
    """The head in `folder`, for this target: of the speculators format, or as the authors of EAGLE, Medusa, Hydra,
    DFlash and DSpark publish theirs, or the MTP layer of the model in that folder. A ModelFormatError says what is
    wrong with it and what to do."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelNotFoundError(f"There is no draft head at {path}: give the folder that holds its config.json.")
    if not (path / "config.json").is_file():
        raise ModelFormatError(f"{path} has no config.json: give the folder of a draft head.")
    raw, where = read_object(path / "config.json"), str(path / "config.json")
    config, tensors = _read(raw, path, target, where)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(USELESS)}
    if not config.reduced and not tensors.get("d2t", torch.zeros(1)).any():
        tensors.pop("d2t", None)  # says of every id that it is the target's own
    config.check_target(target)
    check(config, tensors, str(path))
    return HeadCheckpoint(config, tensors, str(path))


def _read(raw: dict[str, Any], path: Path, target: ModelConfig, where: str) -> tuple[HeadConfig, Tensors]:
    if "speculators_model_type" in raw:
        return speculators.read(raw, read_tensors(path), target, where)
    if "dflash_config" in raw or "target_layer_ids" in raw:
        tensors = read_tensors(path)
        read = official.read_eagle if official.is_eagle3(raw, tensors, where) else official.read_block
        return read(raw, tensors, target, where)
    if "medusa_num_heads" in raw or "hydra_num_heads" in raw:
        return official.read_stacked(raw, read_tensors(path), target, where)
    if raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") \
            or raw.get("num_hidden_layers") == target.num_layers != 1:
        tensors = read_tensors(path, lambda name: mtp.belongs(name, target.num_layers))
        return mtp.read(raw, tensors, target, str(path))
    tensors = read_tensors(path)
    if "fc.weight" in tensors:
        return official.read_eagle(raw, tensors, target, where)
    raise ModelFormatError(f"{where} is of no format of draft heads that is known (speculators, or EAGLE's, Medusa's, "
                           "Hydra's, DFlash's or DSpark's own, or a model with an MTP layer): convert it to the "
                           "speculators format.")


def load_head(folder: str | Path, target: Target, max_model_len: int, *, tokenizer: str | None = None,
              packed: bool | None = None) -> Head:
    """read_head() and build_head() together."""
    found = read_head(folder, target.config)
    return build_head(found.config, found.tensors, target, max_model_len, tokenizer=tokenizer, packed=packed,
                      where=found.where)
