"""What was trained, on disk: `head` in the run's folder, in the speculators format, or `model`, a draft model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.read import read_head
from paceline.models.heads.formats.write import write_head
from paceline.models.heads.tensors import expected
from paceline.models.load.opening import open_checkpoint
from paceline.quantize.writer import FolderWriter, new_folder, write_tokenizer

NAME = "head"
MODEL = "model"
UNTRAINED = ("norm_before_residual", "rope_scaling", "sample_from_anchor")
"""What no tensor tells of, and heads that are trained here always have the same way."""


def write(folder: Path, config: HeadConfig, tensors: dict[str, torch.Tensor], ids: np.ndarray) -> None:
    """Of a run in `folder`. `ids`: the target's id of each draft id."""
    maps = {"d2t": torch.from_numpy(ids - np.arange(len(ids)))} if config.reduced else {}
    write_head(folder / NAME, config, tensors | maps, replace=True)


def write_model(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], model: Path) -> None:
    """A draft model of a run in `folder`, with the tokenizer of the target in `model`. There whole or not at all."""
    beside, path = folder / f".{MODEL}.new", folder / MODEL
    shutil.rmtree(beside, ignore_errors=True)
    with new_folder(beside):
        writer = FolderWriter(beside)
        for name, tensor in tensors.items():
            writer.add(name, tensor.to(torch.float16))
        writer.finish(config | {"torch_dtype": "float16"})
        with open_checkpoint(model) as checkpoint:
            write_tokenizer(checkpoint, beside)
    shutil.rmtree(path, ignore_errors=True)
    beside.rename(path)


@dataclass(frozen=True)
class Begun:
    """A head to train further; its weights are floats, however they were stored."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    ids: np.ndarray
    mask: int | None

    def check(self, trained: HeadConfig) -> None:
        """A ConfigError where there is more to this head than to the one that is trained: without that its other
        weights would draft badly, and nothing would say why. Its own matrices of the vocabulary may stay behind."""
        config = self.config
        known = expected(replace(trained, own_embedding=config.own_embedding, own_lm_head=config.own_lm_head,
                                 whole_vocabulary=False))
        more = sorted(self.tensors.keys() - known.keys())
        more += [name for name in UNTRAINED if getattr(config, name) != getattr(trained, name)]
        if more:
            shown = ", ".join(more[:3]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")
            raise ConfigError(f"--init: that head has {shown}, which the one that is trained has no place for: use the "
                              "settings that head was trained with, or, where no setting is about that, begin without "
                              "--init.")


def read(folder: Path, kind: str, target: ModelConfig) -> Begun:
    """`folder`: that of a head, or of the run that made it."""
    if kind == "draft":
        raise ConfigError("--init is for heads: a draft model begins with layers of its target.")
    found = read_head(folder / NAME if (folder / NAME).is_dir() else folder, target)
    config = found.config
    if config.kind != kind:
        raise ConfigError(f"--init: {folder} holds a {config.kind} head, not a {kind} head.")
    ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if config.reduced:
        ids = ids + found.tensors["d2t"].cpu().numpy().astype(np.int64)
    tensors = {name: tensor.float() for name, tensor in found.tensors.items() if name not in ("d2t", "t2d")}
    return Begun(config, tensors, ids, config.mask_token_id)
