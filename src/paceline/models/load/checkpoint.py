"""Checkpoint: one view of a model's files, whatever their format, with Hugging Face config keys and tensor names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.load.quantised.codes import Outliers
from paceline.models.part import Part


class Checkpoint(ABC):
    """Config and tensors of one model. Tensors are read when asked for; nothing is kept expanded here."""

    path: Path
    config: dict[str, Any]
    """Keys of a Hugging Face config.json; `rope_theta` and `rope_scaling` are always flat keys (see flatten_rope)."""
    rounded: bool = False
    """Whether the layers' matrices are stored in 8 bits or fewer, whatever `packed` can make of them."""
    has_outliers: bool = False
    """Whether some matrices keep columns in floats beside the rounded ones (see outliers)."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor, by its Hugging Face name, in file order."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelFormatError if there is no such tensor."""

    @abstractmethod
    def stored_type(self, name: str) -> str:
        """How the file stores the tensor: "F32", "BF16", "Q4_1", "I64", ..."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor on the CPU, expanded and cast to `dtype`. May share memory with the file: do not write to it.
        Raises ModelFormatError naming the tensor if it is missing or not a float."""

    def part(self, name: str, part: Part, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Part of the tensor, as `tensor` gives it. A format that can reads nothing else; this one is for those whose
        rows or columns do not lie apart, and reads it whole."""
        return part.of(self.tensor(name, dtype))

    def packed(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A matrix as the file stores it: (type name, read-only uint8 [rows, bytes per row]), rows in the same
        order as `tensor` gives them. None where the format has no packed matrices or the tensor is no matrix."""
        return None

    def outliers(self, name: str) -> Outliers | None:
        """Columns of a matrix that the file keeps in floats; `tensor` has them in their places."""
        return None

    def let_go(self) -> None:
        """What was read so far need not stay in memory: a hint after a part has been copied. Reading it again works."""
        return None

    @property
    @abstractmethod
    def revision(self) -> str:
        """Identity of the contents, for traces: the same files give the same string on every machine. Cheap: it
        covers all metadata and sampled pages of the weights, not every byte."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Tensors already handed out stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def flatten_rope(config: dict[str, Any]) -> None:
    """Newer configs nest rope settings under `rope_parameters`; give them the older flat names as well, in place."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, dict) or "rope_theta" not in nested:
        return
    config.setdefault("rope_theta", nested["rope_theta"])
    if nested.get("rope_type", "default") != "default" and not config.get("rope_scaling"):
        config["rope_scaling"] = {key: value for key, value in nested.items() if key != "rope_theta"}
