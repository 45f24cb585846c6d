"""A safetensors folder whose matrices are stored in few bits, as a Checkpoint: each comes out as its formula says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError
from paceline.models.fields import shown
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.quantised.awq import AWQ
from paceline.models.load.quantised.codes import Codes, Outliers
from paceline.models.load.quantised.compressed import CompressedTensors
from paceline.models.load.quantised.gptq import GPTQ
from paceline.models.load.quantised.parts import Parts
from paceline.models.load.quantised.rows import OUTLIER_COLUMNS, BitsAndBytes, OutlierColumns
from paceline.models.load.quantised.settings import Settings
from paceline.models.load.reading import reading
from paceline.models.load.safetensors_folder import SafetensorsFolder
from paceline.models.part import Part


class Scheme(Protocol):
    """How one format stores a matrix. `parts[0]` is the part that only a quantised module has."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def stored_as(self) -> str:
        """The block type of GGUF that comes nearest."""
        ...

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        """(outputs, inputs), from the shapes of the parts alone."""
        ...

    def read(self, parts: Parts, module: str) -> Codes: ...


SCHEMES: dict[str, Callable[[Settings], Scheme]] = {
    "awq": AWQ, "gptq": GPTQ, "compressed-tensors": CompressedTensors, "bitsandbytes": BitsAndBytes,
    "int8-outliers": OutlierColumns,
}


def quantization_config(config: Mapping[str, Any]) -> Any:
    """What a config.json says about quantisation; None: nothing."""
    return config.get("quantization_config") or config.get("compression_config")


class QuantisedFolder(Checkpoint):
    """Every quantised module `m` appears as the tensor `m.weight` that it stands for; its parts do not appear."""

    rounded = True

    def __init__(self, folder: SafetensorsFolder) -> None:
        self.path = folder.path
        self.config = folder.config
        self._folder = folder
        self._parts = Parts(folder)
        raw, where = quantization_config(folder.config), str(folder.path / "config.json")
        if not isinstance(raw, Mapping):
            raise ModelFormatError(f"{where}: quantization_config must be an object, got {shown(raw)}.")
        settings = Settings(raw, where)
        method = raw.get("quant_method")
        if not isinstance(method, str) or method not in SCHEMES:
            raise settings.refusal(f"quant_method {shown(method)}")
        self._scheme = SCHEMES[method](settings)
        marker = "." + self._scheme.parts[0]
        self._modules = {name.removesuffix(marker) + ".weight": name.removesuffix(marker)
                         for name in folder.names() if name.endswith(marker)}
        self.has_outliers = any(self._parts.has(module, OUTLIER_COLUMNS) for module in self._modules.values())
        hidden = {f"{module}.{part}" for module in self._modules.values() for part in self._scheme.parts}
        self._names = list(dict.fromkeys(
            name.removesuffix(marker) + ".weight" if name.endswith(marker) else name
            for name in folder.names() if name.endswith(marker) or name not in hidden))

    def names(self) -> list[str]:
        return list(self._names)

    def has(self, name: str) -> bool:
        return name in self._modules or (self._folder.has(name) and name in self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        module = self._modules.get(name)
        return self._folder.shape(name) if module is None else self._scheme.shape(self._parts, module)

    def stored_type(self, name: str) -> str:
        """Of a quantised module the block type of GGUF that comes nearest."""
        return self._folder.stored_type(name) if name not in self._modules else self._scheme.stored_as

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        module = self._modules.get(name)
        return self._folder.tensor(name, dtype) if module is None else self._codes(module).floats(dtype)

    def part(self, name: str, part: Part, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # Codes and scales of quantised modules are packed across rows or columns, as each scheme has it: read whole.
        return super().part(name, part, dtype) if name in self._modules else self._folder.part(name, part, dtype)

    def packed(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        module = self._modules.get(name)
        return None if module is None else self._codes(module).blocks()

    def outliers(self, name: str) -> Outliers | None:
        module = self._modules.get(name)
        return None if module is None else self._codes(module).outliers

    def _codes(self, module: str) -> Codes:
        with reading(self.path, f"stores '{module}' in a way that cannot be read"):
            return self._scheme.read(self._parts, module)

    @property
    def revision(self) -> str:
        return self._folder.revision

    def close(self) -> None:
        self._folder.close()
