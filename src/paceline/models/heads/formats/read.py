"""read_head(): which format a head's folder has, and that one read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats import marks, mtp, official, speculators
from paceline.models.heads.formats.files import Tensors, read_tensors
from paceline.models.heads.interface import Head
from paceline.models.heads.target import Target
from paceline.models.heads.tensors import check
from paceline.models.load.reading import read_object

USELESS = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Ends of names under which training leaves what is the target's, or can be computed."""
Read = Callable[[Callable[[str], bool]], Tensors]
"""read_tensors() of one folder."""


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
    config, tensors = _read(read_object(path / "config.json"), partial(read_tensors, path), target, path)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(USELESS)}
    if not config.reduced and not tensors.get("d2t", torch.zeros(1)).any():
        tensors.pop("d2t", None)  # says of every id that it is the target's own
    config.check_target(target)
    check(config, tensors, str(path))
    return HeadCheckpoint(config, tensors, str(path))


def read_config(raw: dict[str, Any], names: Iterable[str], target: ModelConfig, folder: str) -> HeadConfig:
    """Of a head for this target whose config.json says this and whose tensors have these names: for whoever wants to
    know its shape, and none of its weights."""
    nothing = torch.empty(0)
    config, _ = _read(raw, lambda wanted: {name: nothing for name in names if wanted(name)}, target, Path(folder))
    config.check_target(target)
    return config


def _read(raw: dict[str, Any], read: Read, target: ModelConfig, path: Path) -> tuple[HeadConfig, Tensors]:
    where = str(path / "config.json")
    if marks.SPECULATORS in raw:
        return speculators.read(raw, read(_all), target, where)
    if any(key in raw for key in marks.BLOCKS):
        tensors = read(_all)
        reader = official.read_eagle if official.is_eagle3(raw, tensors) else official.read_block
        return reader(raw, tensors, target, where)
    if marks.MEDUSA in raw or marks.HYDRA in raw:
        return official.read_stacked(raw, read(_all), target, where)
    if raw.get("num_nextn_predict_layers") or raw.get("mtp_num_hidden_layers") \
            or raw.get("num_hidden_layers") == target.num_layers != 1:
        tensors = read(lambda name: mtp.belongs(name, target.num_layers))
        return mtp.read(raw, tensors, target, str(path))
    tensors = read(_all)
    if "fc.weight" in tensors:
        return official.read_eagle(raw, tensors, target, where)
    raise ModelFormatError(f"{where} is of no format of draft heads that is known (speculators, or EAGLE's, Medusa's, "
                           "Hydra's, DFlash's or DSpark's own, or a model with an MTP layer): convert it to the "
                           "speculators format.")


def _all(name: str) -> bool:
    return True


def load_head(folder: str | Path, target: Target, max_model_len: int, *, tokenizer: str | None = None,
              packed: bool | None = None) -> Head:
    """read_head() and build_head() together."""
    found = read_head(folder, target.config)
    return build_head(found.config, found.tensors, target, max_model_len, tokenizer=tokenizer, packed=packed,
                      where=found.where)
