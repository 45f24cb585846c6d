"""Datastore: token ids of a body of text with their suffix array, in one memory-mapped file.

    header     little-endian, 256 bytes: magic, version, bytes per token, vocabulary size, number of tokens, checksum of
               what follows (CRC-32), fingerprint of the tokenizer, checksum of the header itself
    tokens     uint16 or uint32; texts are separated by the vocabulary size, an id no token has
    places     uint32 or uint64: the suffix array
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError
from paceline.speculation.options import shown
from paceline.speculation.suffix_array import suffix_array

MAGIC = b"PACESUFX"
VERSION = 1
HEADER_SIZE = 256
_LAYOUT = struct.Struct("<8sIIQQI64s")
_CHECK = struct.Struct("<I")
_ALIGN = 16
_CHUNK = 1 << 24
REBUILD = "build it again with `paceline train datastore`"

Progress = Callable[[str, int, int], None]
"""(stage, done, total)"""


@dataclass(frozen=True, slots=True)
class Header:
    vocab_size: int
    tokens: int
    """With separators."""
    checksum: int
    fingerprint: str
    """Of the tokenizer (Tokenizer.fingerprint); empty: unknown."""

    @property
    def token_type(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u2" if self.vocab_size < 1 << 16 else "<u4")

    @property
    def place_type(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u4" if self.tokens < 1 << 32 else "<u8")

    @property
    def places_at(self) -> int:
        """Where in the file the suffix array begins."""
        end = HEADER_SIZE + self.tokens * self.token_type.itemsize
        return -(-end // _ALIGN) * _ALIGN

    @property
    def file_size(self) -> int:
        return self.places_at + self.tokens * self.place_type.itemsize

    def pack(self) -> bytes:
        head = _LAYOUT.pack(MAGIC, VERSION, self.token_type.itemsize, self.vocab_size, self.tokens, self.checksum,
                            self.fingerprint.encode())
        head += _CHECK.pack(zlib.crc32(head))
        return head.ljust(HEADER_SIZE, b"\0")

    @classmethod
    def unpack(cls, raw: bytes, path: Path) -> Header:
        if not raw.startswith(MAGIC):
            raise RequestError(f"{path} is not a datastore: give a file that `paceline train datastore` wrote.",
                               "speculation")
        if len(raw) < HEADER_SIZE:
            raise _broken(path, "its header is cut off")
        _, version, width, vocab_size, tokens, checksum, fingerprint = _LAYOUT.unpack_from(raw)
        if version != VERSION:
            raise RequestError(f"The datastore {path} has format version {version} and this Paceline reads "
                               f"{VERSION}: {REBUILD}.", "speculation")
        if zlib.crc32(raw[:_LAYOUT.size]) != _CHECK.unpack_from(raw, _LAYOUT.size)[0]:
            raise _broken(path, "its header does not match its checksum")
        header = cls(vocab_size, tokens, checksum, fingerprint.rstrip(b"\0").decode("ascii", "replace"))
        if width != header.token_type.itemsize:
            raise _broken(path, "its header contradicts itself")
        return header


def is_datastore(path: Path) -> bool:
    """Whether a file begins like one; says nothing of the rest."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def write_datastore(path: Path, texts: Iterable[Sequence[int]], vocab_size: int, fingerprint: str = "",
                    progress: Progress | None = None) -> Header:
    """Write the datastore of some tokenised texts; whole or not at all."""
    pieces: list[NDArray[np.unsignedinteger]] = []
    kind = Header(vocab_size, 0, 0, "").token_type
    for text in texts:
        ids = np.asarray(text, dtype=np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ValueError(f"token ids must be from 0 to {vocab_size - 1}")
        if len(ids):
            pieces += [ids.astype(kind), np.asarray([vocab_size], kind)]
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, kind)
    if len(tokens) < 3:
        raise RequestError("There is too little text for a datastore: give files with at least two tokens.")
    order = suffix_array(tokens, None if progress is None else lambda done, total: progress("sort", done, total))
    blank = Header(vocab_size, len(tokens), 0, fingerprint)
    body = tokens.tobytes()
    body += b"\0" * (blank.places_at - HEADER_SIZE - len(body))
    places = order.astype(blank.place_type).tobytes()
    header = Header(vocab_size, len(tokens), zlib.crc32(places, zlib.crc32(body)), fingerprint)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in (header.pack(), body, places):
                file.write(part)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return header


class Datastore:
    """An open datastore. Its arrays live in the file; only the pages that look-ups touch are read again."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the whole file once; a RequestError says what is wrong with it."""
        self.path = path
        if "\0" in str(path):
            raise RequestError("The path of a datastore holds a NUL character: give the path of a file that `paceline "
                               "train datastore` wrote.", "speculation")
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise RequestError(f"{shown(str(path))} is no file: give one that `paceline train datastore` wrote.",
                                   "speculation")
            with path.open("rb") as file:
                self.header = Header.unpack(file.read(HEADER_SIZE), path)
                if size != self.header.file_size:
                    raise _broken(path, f"it has {size} bytes where {self.header.file_size} belong")
                if _checksum(file) != self.header.checksum:
                    raise _broken(path, "its content does not match its checksum")
        except (OSError, UnicodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "its path is no text"
            raise RequestError(f"The datastore {shown(str(path))} cannot be read ({reason}): give the path of a file "
                               "that `paceline train datastore` wrote.", "speculation") from problem
        count = self.header.tokens
        if not count:
            raise _broken(path, "it holds no text")
        self.tokens = np.memmap(path, self.header.token_type, "r", HEADER_SIZE, (count,))
        self.places = np.memmap(path, self.header.place_type, "r", self.header.places_at, (count,))
        if int(self.tokens.max()) > self.header.vocab_size or int(self.places.max()) >= count:
            raise _broken(path, "it holds numbers that are out of range")

    def fits(self, vocab_size: int, fingerprint: str | None) -> None:
        """Refuse a target whose token ids mean something else."""
        if self.header.vocab_size > vocab_size:
            raise RequestError(f"The datastore {self.path} has a vocabulary of {self.header.vocab_size} and the model "
                               f"one of {vocab_size}: {REBUILD} --model and this model.", "speculation")
        if fingerprint and self.header.fingerprint and fingerprint != self.header.fingerprint:
            raise RequestError(f"The datastore {self.path} was made with another tokenizer than the model's: "
                               f"{REBUILD} --model and this model.", "speculation")

    def range_of(self, pattern: Sequence[int]) -> tuple[int, int]:
        """Where in `places` the occurrences of a pattern (of up to 16 tokens) stand: [first, last)."""
        wanted = list(pattern)
        first = self._border(wanted, 0, len(self.places), after=False)
        return first, self._border(wanted, first, len(self.places), after=True)

    def _border(self, pattern: list[int], low: int, high: int, *, after: bool) -> int:
        """The first place in [low, high) whose tokens are not before (not `after`: at or before) the pattern."""
        tokens, places, size = self.tokens, self.places, len(pattern)
        while low < high:
            middle = (low + high) // 2
            at = int(places[middle])
            there = tokens[at:at + size].tolist()
            if there < pattern or (after and there == pattern):
                low = middle + 1
            else:
                high = middle
        return low

    def longest_suffix(self, tokens: Sequence[int], longest: int, shortest: int) -> tuple[int, int, int]:
        """(length, first, last) of the longest suffix of `tokens` that occurs; length 0: none of `shortest` or more.
        If a suffix occurs so do all shorter ones: the length is found by halving."""
        found = (0, 0, 0)
        low, high = shortest, min(longest, len(tokens))
        while low <= high:
            length = (low + high) // 2
            first, last = self.range_of(tokens[-length:])
            if first < last:
                found = (length, first, last)
                low = length + 1
            else:
                high = length - 1
        return found

    def following(self, first: int, last: int, skip: int, size: int, most: int) -> NDArray[np.int64]:
        """What follows `skip` tokens after the given places, [hits, size], -1 from the end of a text on. Of more than
        `most` places, that many evenly spread ones. The rows come sorted."""
        if last - first > most:
            chosen = self.places[first + np.arange(most, dtype=np.int64) * (last - first) // most]
        else:
            chosen = self.places[first:last]
        at = chosen.astype(np.int64)[:, None] + skip + np.arange(size)
        rows: NDArray[np.int64] = self.tokens[np.minimum(at, len(self.tokens) - 1)].astype(np.int64)
        over = np.logical_or.accumulate((rows == self.header.vocab_size) | (at >= len(self.tokens)), axis=1)
        rows[over] = -1
        return rows


def _checksum(file: BinaryIO) -> int:
    """Of what is left to read."""
    checksum = 0
    while chunk := file.read(_CHUNK):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _broken(path: Path, why: str) -> RequestError:
    return RequestError(f"The datastore {path} is damaged ({why}): {REBUILD}.", "speculation")
