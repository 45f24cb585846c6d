"""What is to be done, checked before anything is read or written; and which tensors it is done to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.models.load.checkpoint import Checkpoint

TARGETS = ("int8", "int4", "awq")
GROUP_SIZES = (32, 64, 128)
_MATRIX = re.compile(r"(?:^|\.)layers\.\d+\.(?:.+\.)?(\w+)\.weight")
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Small, and a rounded score could send a token to another expert."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Round `model` to `to` and write it to `out`."""

    model: str | None = None
    to: str
    out: Path
    text: Path | None = None
    """To calibrate with (int4: where the architecture is known) and, where `measure` is None, to measure on; different
    parts of it."""
    measure: Path | None = None
    group_size: int | None = None
    """Columns that share a scale, in 4 bits; None: 128, or 32 where 128 does not divide every width."""
    outliers: float | None = None
    """With int8: input features that reach this on the calibration text keep their columns in floats."""
    calibration_tokens: int = 4096
    measured_tokens: int = 4096
    device: str = "cpu"

    @property
    def needs_text(self) -> bool:
        return self.to == "awq" or self.outliers is not None

    def check(self) -> None:
        if self.to not in TARGETS:
            raise ConfigError(f"--to {self.to} is no target: use one of {', '.join(TARGETS)}.")
        if self.needs_text and self.text is None:
            what = "--to awq" if self.to == "awq" else "--outliers"
            raise ConfigError(f"{what} looks at what runs through the layers: give a text to calibrate with (--text).")
        if self.outliers is not None and (self.to != "int8" or not self.outliers > 0):
            raise ConfigError("--outliers is a positive threshold that goes with --to int8.")
        if self.group_size is not None and (self.to == "int8" or self.group_size not in GROUP_SIZES):
            raise ConfigError(f"--group-size is one of {', '.join(map(str, GROUP_SIZES))} and goes with --to int4 or "
                              "awq; int8 has one scale per row.")
        for name in ("calibration_tokens", "measured_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 2, got {getattr(self, name)}.")


def matrices(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """The layers' matrices [out, in] by name: everything that is multiplied there but routers."""
    found: dict[str, tuple[int, int]] = {}
    for name in checkpoint.names():
        match = _MATRIX.search(name)
        shape = checkpoint.shape(name)
        if match and match[1] not in _ROUTERS and len(shape) == 2:
            found[name] = (shape[0], shape[1])
    if not found:
        raise ConfigError(f"{checkpoint.path} has no matrices in layers that `paceline quantize` knows by name.")
    return found


def choose_group_size(job: Job, shapes: dict[str, tuple[int, int]]) -> int:
    """Columns a scale is shared by: one number for the whole model, as the formats have it."""
    if job.group_size is not None:
        return job.group_size
    return 128 if all(columns % 128 == 0 for _, columns in shapes.values()) else 32


def fitting(job: Job, shapes: dict[str, tuple[int, int]], group_size: int) -> set[str]:
    """Those that the format can hold; the others stay in floats."""
    names = set(shapes) if job.to == "int8" else {
        name for name, (rows, columns) in shapes.items() if rows % 8 == 0 and columns % group_size == 0}
    if not names:
        raise ConfigError(f"No matrix of this model has a width of whole groups of {group_size} and rows in eights: "
                          "use --to int8.")
    return names


def in_floats(checkpoint: Checkpoint, chosen: set[str]) -> list[str]:
    """Modules that multiply or look up and are not among the chosen: embeddings, routers, what does not fit; and the
    head, which is a module even where it has no tensor of its own."""
    names = [name.removesuffix(".weight") for name in checkpoint.names()
             if name.endswith(".weight") and name not in chosen and len(checkpoint.shape(name)) > 1]
    return list(dict.fromkeys([*names, "lm_head"]))
