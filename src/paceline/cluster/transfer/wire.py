"""PrefixBlocks as bytes: a head in JSON, then the blocks as they lie in a cache. Nothing of it is ever executed."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch

from paceline.cache.block_bytes import PlaneFormat
from paceline.cache.handover import Piece
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError

MAGIC = b"paceline blocks 1\n"
LONGEST_HEAD = 64 << 20
BEGIN = len(MAGIC) + 8


def pack_head(blocks: PrefixBlocks) -> bytes:
    """All of them but the data."""
    head = json.dumps({
        "facts": blocks.facts, "block_size": blocks.block_size, "planes": blocks.planes, "scope": blocks.scope,
        "tokens": blocks.tokens, "pieces": [[[piece.place, piece.ahead] for piece in own] for own in blocks.pieces],
        "rows": [list(rows.shape) for rows in blocks.data]}).encode()
    return MAGIC + len(head).to_bytes(8, "big") + head


def pack(blocks: PrefixBlocks) -> list[memoryview]:
    """One after the other, without copying what lies in host memory already."""
    arrays: list[Any] = [rows.contiguous().view(-1).numpy() for rows in blocks.data if rows.numel()]
    return [memoryview(pack_head(blocks)), *(memoryview(array) for array in arrays)]


def digest_of(parts: list[memoryview]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def unpack(received: bytearray, digest: str) -> PrefixBlocks:
    """Raises TransferError unless every byte is what was offered. Takes the memory over."""
    if digest_of([memoryview(received)]) != digest:
        raise TransferError("The blocks were damaged on their way: the checksum differs.")
    shapes, blank = unpack_head(bytes(received[:BEGIN + _head_length(received)]))
    begin, data = BEGIN + _head_length(received), []
    if len(received) != begin + sum(math.prod(shape) for shape in shapes):
        raise TransferError("The blocks that came are not as many as was announced.")
    for shape in shapes:
        size = math.prod(shape)
        rows = torch.frombuffer(received, dtype=torch.uint8, count=size, offset=begin) if size else torch.empty(
            0, dtype=torch.uint8)
        data.append(rows.view(*shape))
        begin += size
    return filled(blank, data)


def unpack_head(head: bytes) -> tuple[list[tuple[int, int]], PrefixBlocks]:
    """The shape of each group's data, and everything but that data."""
    length = _head_length(head)
    try:
        found = json.loads(head[BEGIN:BEGIN + length])
        shapes = [(_whole(count), _whole(size)) for count, size in found["rows"]]
        return shapes, PrefixBlocks(
            {str(name): str(value) for name, value in found["facts"].items()}, _whole(found["block_size"]),
            tuple(tuple(PlaneFormat(str(name), str(dtype), _whole(size), bool(extra))
                        for name, dtype, size, extra in own) for own in found["planes"]),
            str(found["scope"]), tuple(map(_whole, found["tokens"])),
            tuple(tuple(Piece(group, _whole(place), tuple(map(_whole, ahead))) for place, ahead in own)
                  for group, own in enumerate(found["pieces"])), ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise TransferError(f"What came is no announcement of blocks ({type(problem).__name__}: {problem}).") from None


def filled(blank: PrefixBlocks, data: list[torch.Tensor]) -> PrefixBlocks:
    if not len(data) == len(blank.pieces) == len(blank.planes):
        raise TransferError("What came names other cache groups than it has.")
    return PrefixBlocks(blank.facts, blank.block_size, blank.planes, blank.scope, blank.tokens, blank.pieces,
                        tuple(data))


def _head_length(received: bytes | bytearray) -> int:
    length = int.from_bytes(received[len(MAGIC):BEGIN], "big")
    if received[:len(MAGIC)] != MAGIC or not 0 < length <= min(LONGEST_HEAD, len(received) - BEGIN):
        raise TransferError("What came is no announcement of blocks: it is cut off, or of another version.")
    return length


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no number of anything")
    return value
