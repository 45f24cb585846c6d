"""Parts: the raw tensors a quantised matrix is stored in, each checked against the shape it should have."""

from __future__ import annotations

import torch

from paceline.errors import ModelFormatError
from paceline.models.load.safetensors_folder import SafetensorsFolder


class Parts:
    """Reads the tensors `<module>.<part>` of a folder."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self.folder = folder

    def has(self, module: str, part: str) -> bool:
        return self.folder.has(f"{module}.{part}")

    def shape(self, module: str, part: str) -> tuple[int, ...]:
        """Of a matrix; ModelFormatError names it when it is none."""
        name = f"{module}.{part}"
        found = self.folder.shape(name)
        if len(found) != 2 or not all(found):
            raise ModelFormatError(f"tensor '{name}' in {self.folder.path} has shape {list(found)}, but should be a "
                                   "matrix: the download is broken or the format is another one.")
        return found

    def take(self, module: str, part: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> torch.Tensor:
        """As stored. `kinds`: the types it may be stored as, by safetensors' names."""
        name = f"{module}.{part}"
        found, stored = self.folder.shape(name), self.folder.stored_type(name)
        if found != shape:
            raise ModelFormatError(
                f"tensor '{name}' in {self.folder.path} has shape {list(found)}, but with the other tensors of "
                f"'{module}' and the quantization_config it should be {list(shape)}: they do not belong together.")
        if stored not in kinds:
            raise ModelFormatError(f"tensor '{name}' in {self.folder.path} is stored as {stored}, but this format "
                                   f"stores it as {' or '.join(kinds)}.")
        return self.folder.stored(name)

    def groups(self, module: str, columns: int, size: int) -> int:
        """How many groups of `size` (-1: all) the columns make."""
        if size == -1:
            return 1
        if columns % size:
            raise ModelFormatError(f"'{module}' in {self.folder.path} has {columns} columns, which are not groups of "
                                   f"{size}: config and weights do not belong together.")
        return columns // size
