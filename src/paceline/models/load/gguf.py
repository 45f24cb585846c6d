"""GGUF files (v2 and v3, little endian): metadata parsed on demand, tensors as views into a memory map.

Opening walks the key-value section without decoding it: only where each value starts is kept, so a vocabulary
of a hundred thousand strings costs milliseconds until somebody asks for it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.fields import Fields
from paceline.models.load.dequant import SUPPORTED

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_UINT8, _INT8, _UINT16, _INT16, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64, _FLOAT64 = range(13)
_SCALARS: dict[int, str] = {
    _UINT8: "<u1", _INT8: "<i1", _UINT16: "<u2", _INT16: "<i2", _UINT32: "<u4", _INT32: "<i4", _FLOAT32: "<f4",
    _BOOL: "<u1", _UINT64: "<u8", _INT64: "<i8", _FLOAT64: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor type stores its elements: `elements` values in `bytes` bytes, rows never share a block."""

    name: str
    elements: int
    bytes: int


BLOCK_FORMATS: dict[int, BlockFormat] = {
    code: BlockFormat(name, elements, size)
    for code, name, elements, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. `shape` is in torch order (rows first, contiguous dimension last)."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int
    """Absolute byte offset in the file."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.format.elements * self.format.bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Metadata(Fields):
    """Of a GGUF file, whose arrays are lists of texts, or of numpy's."""

    def named(self, key: str) -> str:
        return f"metadata key '{key}' in {self.where}"

    def missing(self, key: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where} has no metadata key '{key}': the file was converted by a tool that left "
                                "it out; convert or download it again.")

    def flag(self, key: str, default: bool = False) -> bool:
        """Some write 0 and 1."""
        value = self.get(key, default)
        return value == 1 if isinstance(value, int) and value in (0, 1) else super().flag(key, default)

    def numbers(self, key: str) -> npt.NDArray[Any] | None:
        """An array of them; None: there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, np.ndarray) and value != []:
            raise self.wrong(key, "an array of numbers", value)
        return value if isinstance(value, np.ndarray) else None if value is None else np.zeros(0)


class GGUFFile:
    """A GGUF file, mapped into memory. Views handed out keep the map alive after close()."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise ModelFormatError(f"{path} is empty: download it again.")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"There is no file {path}: check the path.") from error
        except OSError as error:
            raise ModelFormatError(f"{path} cannot be read ({error.strerror}): check the file.") from error
        self._map: mmap.mmap | None = mapped
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, dtype=np.uint8)
        self._view = memoryview(mapped)
        self._values: dict[str, tuple[int, int]] = {}
        """Metadata key -> (value type, offset of the value)."""
        self.tensors: dict[str, TensorInfo] = {}
        cursor = self._read_header()
        cursor = self._index_metadata(cursor)
        self.header_bytes = self._index_tensors(cursor)
        """Offset of the tensor data: everything before it is metadata."""

    def let_go(self) -> None:
        """Take the pages read so far out of this process; the system keeps them as long as it likes."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    # -- metadata ------------------------------------------------------------------------------------------------

    def keys(self) -> Iterator[str]:
        return iter(self._values)

    def has(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, parsed now: a number, bool, string, numpy array or list of strings."""
        found = self._values.get(key)
        if found is None:
            return default
        kind, start = found
        return self._parse(kind, start, key)[0]

    @property
    def metadata(self) -> Metadata:
        """The values, each checked when it is read."""
        return Metadata(self, str(self.path))

    def length(self, key: str) -> int | None:
        """Number of items of the array under `key`, without parsing it; None if it is not an array."""
        kind, start = self._values.get(key, (None, 0))
        return self._u64(start + 4, f"metadata key '{key}'") if kind == _ARRAY else None

    # -- tensors -------------------------------------------------------------------------------------------------

    def data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The packed blocks of a tensor: a read-only view, [rows, bytes per row]."""
        flat = self.map[info.start:info.start + info.nbytes]
        return flat.reshape(info.rows, info.row_bytes)

    @property
    def map(self) -> npt.NDArray[np.uint8]:
        """The whole file, read-only."""
        if self._bytes is None:
            raise ValueError(f"{self.path} has been closed")
        return self._bytes

    def close(self) -> None:
        self._map = None
        self._bytes = None
        self._view = memoryview(b"")

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # -- parsing -------------------------------------------------------------------------------------------------

    def _read_header(self) -> int:
        if bytes(self._view[:4]) != MAGIC:
            raise ModelFormatError(f"{self.path} is not a GGUF file (it does not start with 'GGUF'): check the path.")
        version = self._u32(4, "the header")
        if version not in (2, 3):
            reason = "it is big endian" if version & 0xFFFF == 0 else f"it has version {version}"
            raise ModelFormatError(f"{self.path} cannot be read: {reason}; convert it to little-endian GGUF v3.")
        self._tensor_count = self._u64(8, "the header")
        self._key_count = self._u64(16, "the header")
        return 24

    def _index_metadata(self, cursor: int) -> int:
        last = "the header"
        for index in range(self._key_count):
            where = f"metadata key {index + 1} of {self._key_count} (after {last})"
            key, cursor = self._string(cursor, where)
            last = f"'{key}'"
            where = f"metadata key '{key}'"
            kind = self._u32(cursor, where)
            if key in self._values:
                raise ModelFormatError(f"{self.path} holds {where} twice: the file is corrupt; download it again.")
            self._values[key] = (kind, cursor + 4)
            cursor = self._skip(kind, cursor + 4, where)
        return cursor

    def _index_tensors(self, cursor: int) -> int:
        found: list[tuple[str, tuple[int, ...], BlockFormat, int]] = []
        last = "the metadata"
        for index in range(self._tensor_count):
            name, cursor = self._string(cursor, f"tensor {index + 1} of {self._tensor_count} (after {last})")
            last = f"'{name}'"
            where = f"tensor '{name}'"
            dims = self._u32(cursor, where)
            if not 1 <= dims <= MAX_DIMENSIONS:
                raise ModelFormatError(f"{where} in {self.path} has {dims} dimensions: the file is corrupt; "
                                       "download it again.")
            self._check(cursor + 4, 8 * dims + 12, where)
            shape = struct.unpack_from(f"<{dims}Q", self._view, cursor + 4)[::-1]
            code, offset = struct.unpack_from("<IQ", self._view, cursor + 4 + 8 * dims)
            cursor += 16 + 8 * dims
            block = BLOCK_FORMATS.get(code)
            if block is None:
                raise ModelFormatError(f"{where} in {self.path} has the unknown type {code}: the file is corrupt or "
                                       f"newer than this version, which reads {', '.join(SUPPORTED)}.")
            if not all(shape):
                raise ModelFormatError(f"{where} in {self.path} has the shape {list(shape)}, and so no values at all: "
                                       "the file is corrupt; download it again.")
            if shape[-1] % block.elements:
                raise ModelFormatError(f"{where} in {self.path} has rows of {shape[-1]} values, which {block.name} "
                                       f"cannot hold (blocks of {block.elements}): download the file again.")
            found.append((name, shape, block, offset))
        alignment = self.metadata.count("general.alignment", DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            raise ModelFormatError(f"metadata key 'general.alignment' in {self.path} is {alignment}, not a power of "
                                   "two: download the file again.")
        data_start = -(-cursor // alignment) * alignment
        for name, shape, block, offset in found:
            if name in self.tensors:
                raise ModelFormatError(f"tensor '{name}' is in {self.path} twice: download the file again.")
            info = TensorInfo(name, shape, block, data_start + offset)
            if info.start + info.nbytes > self.size:
                raise ModelFormatError(
                    f"{self.path} is truncated: tensor '{name}' needs bytes up to {info.start + info.nbytes:,} but the "
                    f"file has {self.size:,}; download it again.")
            self.tensors[name] = info
        self._check_apart()
        return min(data_start, self.size)

    def _check_apart(self) -> None:
        """No two tensors share bytes: they would be more in memory than in the file."""
        ordered = sorted(self.tensors.values(), key=lambda info: info.start)
        for before, after in pairwise(ordered):
            if before.start + before.nbytes > after.start:
                raise ModelFormatError(f"tensors '{before.name}' and '{after.name}' in {self.path} overlap: the file "
                                       "is corrupt; download it again.")

    def _check(self, start: int, count: int, where: str) -> None:
        if start + count > self.size:
            raise ModelFormatError(f"{self.path} is truncated or corrupt: it ends inside {where}; download it again.")

    def _u32(self, start: int, where: str) -> int:
        self._check(start, 4, where)
        return int(_U32.unpack_from(self._view, start)[0])

    def _u64(self, start: int, where: str) -> int:
        self._check(start, 8, where)
        return int(_U64.unpack_from(self._view, start)[0])

    def _string(self, start: int, where: str) -> tuple[str, int]:
        length = self._u64(start, where)
        self._check(start + 8, length, where)
        end = start + 8 + length
        try:
            return str(self._view[start + 8:end], "utf-8"), end
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self.path}: {where} is not valid UTF-8; the file is corrupt, download it "
                                   "again.") from error

    def _skip(self, kind: int, start: int, where: str) -> int:
        """Where the value that begins at `start` ends."""
        if kind in _SCALARS:
            end = start + int(_SCALARS[kind][-1])
        elif kind == _STRING:
            end = start + 8 + self._u64(start, where)
        elif kind == _ARRAY:
            item, count = self._u32(start, where), self._u64(start + 4, where)
            end = start + 12
            if item in _SCALARS:
                end += count * int(_SCALARS[item][-1])
            elif item == _STRING:
                unpack, view = _U64.unpack_from, self._view
                try:
                    for _ in range(count):
                        end += 8 + unpack(view, end)[0]
                except (struct.error, OverflowError, IndexError):
                    self._check(self.size, 1, where)
            else:
                raise self._bad_kind(item, where)
        else:
            raise self._bad_kind(kind, where)
        self._check(end, 0, where)
        return end

    def _parse(self, kind: int, start: int, key: str) -> tuple[Any, int]:
        where = f"metadata key '{key}'"
        if kind == _STRING:
            return self._string(start, where)
        if kind == _ARRAY:
            item, count = self._u32(start, where), self._u64(start + 4, where)
            return (self._strings(start + 12, count, where) if item == _STRING
                    else self._numbers(item, start + 12, count)), 0
        value = self._numbers(kind, start, 1)[0]
        # The shortest decimal that names a float32: 1e-05 instead of 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT32 else value.item(), 0

    def _numbers(self, kind: int, start: int, count: int) -> npt.NDArray[Any]:
        values = np.frombuffer(self._view, dtype=_SCALARS[kind], count=count, offset=start)
        return values.astype(np.bool_) if kind == _BOOL else values

    def _strings(self, start: int, count: int, where: str) -> list[str]:
        unpack, view = _U64.unpack_from, self._view
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                end = start + 8 + unpack(view, start)[0]
                append(str(view[start + 8:end], "utf-8"))
                start = end
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{self.path}: item {len(strings)} of {where} is not valid UTF-8; the file is "
                                   "corrupt, download it again.") from error
        return strings

    def _bad_kind(self, kind: int, where: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {where} has the unknown value type {kind}; the file is corrupt, "
                                "download it again.")
