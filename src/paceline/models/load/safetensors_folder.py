"""A Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from paceline.errors import ModelFormatError
from paceline.models.load.checkpoint import Checkpoint, flatten_rope
from paceline.models.load.identity import add_sample
from paceline.models.load.reading import read_json, read_object, reading
from paceline.models.part import Part

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder(Checkpoint):
    """Tensors are looked up in the shard that the index names; shards stay mapped until close()."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_object(path / "config.json")
        flatten_rope(self.config)
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        if (path / INDEX).exists():
            self._read_index()
        else:
            self._read_loose()

    def _read_index(self) -> None:
        index = read_json(self.path / INDEX)
        shard_of = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shard_of, dict) or not shard_of:
            raise ModelFormatError(f"{self.path / INDEX} has no 'weight_map': download it again.")
        present: dict[str, set[str]] = {}
        for name, shard in shard_of.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ModelFormatError(f"{self.path / INDEX} puts tensor '{name}' in {shard!r}, which is no file name "
                                       "of this folder: download it again.")
            if shard not in present:
                if not (self.path / shard).is_file():
                    raise ModelFormatError(f"{self.path} has no file {shard}, where the index says tensor '{name}' "
                                           "is: download that shard.")
                present[shard] = set(self._open(shard).keys())
            if name not in present[shard]:
                raise ModelFormatError(f"tensor '{name}' is not in {self.path / shard}, where {INDEX} says it is: "
                                       "download both files again.")
        self._shard_of = dict(shard_of)

    def _read_loose(self) -> None:
        files = [SINGLE] if (self.path / SINGLE).exists() else sorted(
            file.name for file in self.path.glob("*.safetensors"))
        if not files:
            raise ModelFormatError(f"{self.path} has config.json but no safetensors file: download the weights in "
                                   "safetensors format (pickled .bin weights are not read).")
        if len(files) > 1:
            raise ModelFormatError(f"{self.path} has several safetensors files ({', '.join(files[:3])}, ...) but no "
                                   f"{INDEX} to say which tensor is where: download the index.")
        for name in self._open(files[0]).keys():  # noqa: SIM118 - safe_open objects are not iterable
            self._shard_of[name] = files[0]

    def _open(self, shard: str) -> Any:
        if shard not in self._shards:
            with reading(self.path / shard):
                self._shards[shard] = safe_open(self.path / shard, framework="pt", device="cpu")
        return self._shards[shard]

    def _slice(self, name: str) -> Any:
        if name not in self._shard_of:
            raise ModelFormatError(f"tensor '{name}' is missing in {self.path}: the files do not belong to the "
                                   "architecture that config.json names, or the download is incomplete.")
        with reading(self.path / self._shard_of[name]):
            return self._open(self._shard_of[name]).get_slice(name)

    def names(self) -> list[str]:
        return list(self._shard_of)

    def has(self, name: str) -> bool:
        return name in self._shard_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def stored_type(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self._check_floats(name)
        return self.stored(name).to(dtype)

    def part(self, name: str, part: Part, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self._check_floats(name)
        found = self._slice(name)
        with reading(self.path / self._shard_of[name], f"has no tensor '{name}' that can be read"):
            pieces = [found[begin:end] if part.axis == 0 else found[:, begin:end] for begin, end in part.ranges]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.axis)).to(dtype)

    def _check_floats(self, name: str) -> None:
        stored = self.stored_type(name)
        if stored not in FLOAT_TYPES:
            raise ModelFormatError(f"tensor '{name}' in {self.path} is stored as {stored}; this version reads "
                                   f"{', '.join(FLOAT_TYPES)}, and others only where config.json has a "
                                   "quantization_config that says what they stand for.")

    def stored(self, name: str) -> torch.Tensor:
        """The tensor in the type it is stored as, integers included. Not to be written to."""
        if name not in self._shard_of:
            self._slice(name)
        with reading(self.path / self._shard_of[name], f"has no tensor '{name}' that can be read"):
            tensor: torch.Tensor = self._open(self._shard_of[name]).get_tensor(name)
        return tensor

    @cached_property
    def revision(self) -> str:
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for shard in sorted(set(self._shard_of.values())):
            data = np.memmap(self.path / shard, dtype=np.uint8, mode="r")
            header = int.from_bytes(data[:8].tobytes(), "little")
            digest.update(data[:8 + header].tobytes())
            add_sample(digest, data[8 + header:])
        return "sha256:" + digest.hexdigest()[:32]

    def close(self) -> None:
        self._shards.clear()
