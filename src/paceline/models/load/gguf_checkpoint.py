"""A GGUF file as a Checkpoint: blocks stay packed in the memory map until somebody asks for a tensor."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelFormatError
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.dequant import dequantize
from paceline.models.load.gguf import GGUFFile, TensorInfo
from paceline.models.load.gguf_config import hf_config, hf_names
from paceline.models.load.identity import add_sample
from paceline.models.part import Part


class _Entry(NamedTuple):
    info: TensorInfo
    expert: int | None
    """Index along the first dimension of a merged expert tensor."""
    heads: int
    """0, or the number of heads whose rows the file holds with the two rotary halves interleaved."""


class GGUFCheckpoint(Checkpoint):
    """`file` is open to whoever needs the metadata (the tokenizer, the chat template)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self.config = hf_config(self.file)
        self._entries: dict[str, _Entry] = {}
        self._llama = (architecture := self.file.metadata.text("general.architecture")) == "llama"
        for info in self.file.tensors.values():
            for name, expert in hf_names(info.name, info.shape, architecture):
                if name in self._entries:
                    raise ModelFormatError(f"tensor '{info.name}' in {path} is there twice, alone and among all "
                                           "experts': the file is corrupt, download it again.")
                self._entries[name] = _Entry(info, expert, self._interleaved_heads(name))

    def _interleaved_heads(self, name: str) -> int:
        if not self._llama:
            return 0
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return int(self.config["num_key_value_heads"])
        return 0

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelFormatError(f"tensor '{name}' is missing in {self.path}: the file holds another architecture "
                                   "than it says, or only a part of the model.")
        return self._entries[name]

    def names(self) -> list[str]:
        return list(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        entry = self._entry(name)
        return entry.info.shape if entry.expert is None else entry.info.shape[1:]

    def stored_type(self, name: str) -> str:
        return self._entry(name).info.format.name

    def part(self, name: str, part: Part, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        entry, shape = self._entry(name), self.shape(name)
        if len(shape) != 2:
            return super().part(name, part, dtype)
        rows = self._stored_rows(entry)
        if part.axis == 0:
            if entry.heads:
                part = part.reordered(self._row_order(name, entry, shape[0]).tolist())
            return dequantize(np.concatenate([rows[begin:end] for begin, end in part.ranges]), entry.info.format.name,
                              part.shape(shape), dtype=dtype, name=name)
        block, size = entry.info.format.elements, entry.info.format.bytes
        if entry.heads or any(place % block for both in part.ranges for place in both):
            return super().part(name, part, dtype)  # a block of columns would be cut
        columns = [rows[:, begin // block * size:end // block * size] for begin, end in part.ranges]
        return dequantize(np.ascontiguousarray(np.concatenate(columns, axis=1)), entry.info.format.name,
                          part.shape(shape), dtype=dtype, name=name)

    def _stored_rows(self, entry: _Entry) -> npt.NDArray[np.uint8]:
        rows = self.file.data(entry.info)
        if entry.expert is None:
            return rows
        own: npt.NDArray[np.uint8] = rows.reshape(entry.info.shape[0], -1, entry.info.row_bytes)[entry.expert]
        return own

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        entry, shape = self._entry(name), self.shape(name)
        rows = self._stored_rows(entry)
        tensor = dequantize(rows, entry.info.format.name, shape, dtype=dtype, name=name)
        return tensor[torch.from_numpy(self._row_order(name, entry, shape[0]))] if entry.heads else tensor

    def packed(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        entry, shape = self._entry(name), self.shape(name)
        if len(shape) != 2:
            return None
        rows = self._stored_rows(entry)
        if entry.heads:
            rows = rows[self._row_order(name, entry, shape[0])]
            rows.flags.writeable = False
        return entry.info.format.name, rows

    def let_go(self) -> None:
        self.file.let_go()

    def _row_order(self, name: str, entry: _Entry, rows: int) -> npt.NDArray[np.int64]:
        """Rows of the file in Hugging Face order: each head's even rows, then its odd ones."""
        if rows % (2 * entry.heads):
            raise ModelFormatError(f"tensor '{name}' in {self.path} has {rows} rows, which {entry.heads} heads with "
                                   "rotary halves cannot share: the metadata does not fit the tensors.")
        return np.arange(rows, dtype=np.int64).reshape(entry.heads, -1, 2).swapaxes(1, 2).reshape(-1)

    @cached_property
    def revision(self) -> str:
        data, header = self.file.map, self.file.header_bytes
        digest = hashlib.sha256(data[:header].tobytes())
        add_sample(digest, data[header:])
        return "sha256:" + digest.hexdigest()[:32]

    def close(self) -> None:
        self.file.close()
