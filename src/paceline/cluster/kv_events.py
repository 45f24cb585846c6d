"""KV events: which blocks of text an engine's cache holds, told to other processes in vLLM's public format."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError

DEVICE, HOST = "GPU", "CPU"
"""Where a block lies, in the format's words: in the cache that steps read, whatever that runs on, or in host memory
beside it."""
MOST_BLOCKS = 1 << 16
"""Of one event that is believed."""
LARGEST_KEY = (1 << 64) - 1
LARGEST_TOKEN = (1 << 32) - 1
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number, after the last batch that is replayed."""

Key = int | bytes


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other, the first one after `parent_block_hash` (None: at the beginning of a text)."""

    block_hashes: list[Key]
    parent_block_hash: Key | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """Of each block what beside its tokens and its parent tells it apart: a hash of its scope (cache/keys.py)."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: list[Key]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
KINDS: dict[str, type[KVEvent]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


class EventError(ValueError):
    """What was received is no event; says why."""


def needed(name: str) -> ModuleType:
    """A package that events need and Paceline does not."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"KV events need the package {name!r}: pip install 'paceline[cluster]'.") from None


def encode(events: Sequence[KVEvent], at: float | None = None) -> bytes:
    """A batch: [seconds since 1970, events, rank]. Each event is a map with its `type` and what is not left out."""
    packed = [{"type": type(event).__name__} | {
        spec.name: value for spec in fields(event)
        if (value := getattr(event, spec.name)) is not None or spec.name == "parent_block_hash"} for event in events]
    return bytes(needed("msgpack").packb([time.time() if at is None else at, packed, 0], use_bin_type=True))


def decode(payload: bytes) -> tuple[list[KVEvent], list[str]]:
    """The events of a batch, and of those that are none why. Raises EventError where it is no batch at all."""
    try:
        batch = needed("msgpack").unpackb(payload, raw=False, strict_map_key=False)
    except ConfigError:
        raise
    except Exception as problem:  # whatever a decoder makes of bytes that anybody may have sent
        raise EventError(f"no msgpack ({type(problem).__name__})") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise EventError("no batch: [time, events, rank]")
    events: list[KVEvent] = []
    problems: list[str] = []
    for found in batch[1]:
        try:
            events.append(_event(found))
        except EventError as problem:
            problems.append(str(problem))
    return events, problems


def _event(found: Any) -> KVEvent:
    """From a map with `type`, or from an array that begins with it."""
    if isinstance(found, list) and found and isinstance(found[0], str):
        kind = KINDS.get(found[0])
        names = [spec.name for spec in fields(kind)] if kind is not None else []
        values = dict(zip(names, found[1:]))
    elif isinstance(found, dict) and isinstance(found.get("type"), str):
        kind = KINDS.get(found["type"])
        values = {} if kind is None else {spec.name: found[spec.name] for spec in fields(kind) if spec.name in found}
    else:
        raise EventError("no event: a map or an array with its type")
    if kind is BlockStored:
        return _stored(values)
    if kind is BlockRemoved:
        return BlockRemoved(_keys(values.get("block_hashes")), _text(values, "medium"))
    if kind is AllBlocksCleared:
        return AllBlocksCleared()
    raise EventError("an unknown type")


def _stored(values: dict[str, Any]) -> BlockStored:
    keys, tokens, size = _keys(values.get("block_hashes")), values.get("token_ids"), values.get("block_size")
    if type(size) is not int or not 0 < size <= MOST_BLOCKS:
        raise EventError("BlockStored: block_size is no number of tokens")
    if not isinstance(tokens, list) or len(tokens) != len(keys) * size:
        raise EventError("BlockStored: token_ids are not block_size for each of block_hashes")
    if any(type(token) is not int or not 0 <= token <= LARGEST_TOKEN for token in tokens):
        raise EventError("BlockStored: token_ids are no tokens")
    parent = values.get("parent_block_hash")
    extra = values.get("extra_keys")
    if extra is not None and (not isinstance(extra, list) or len(extra) != len(keys) or any(
            one is not None and not isinstance(one, list) for one in extra)):
        raise EventError("BlockStored: extra_keys are not one list, or none, for each block")
    lora = values.get("lora_id")
    if lora is not None and type(lora) is not int:
        raise EventError("BlockStored: lora_id is no number")
    return BlockStored(keys, None if parent is None else _keys([parent])[0], tokens, size, lora,
                       _text(values, "medium"), _text(values, "lora_name"), extra)


def _keys(found: Any) -> list[Key]:
    if not isinstance(found, list) or not 0 < len(found) <= MOST_BLOCKS:
        raise EventError("block_hashes are no list of hashes")
    for key in found:
        whole = type(key) is int and -(1 << 63) <= key <= LARGEST_KEY
        if not whole and not (isinstance(key, bytes) and 0 < len(key) <= 64):
            raise EventError("block_hashes are neither 64-bit numbers nor bytes")
    return found


def _text(values: dict[str, Any], name: str) -> str | None:
    found = values.get(name)
    if found is not None and (not isinstance(found, str) or len(found) > 256):
        raise EventError(f"{name} is no short text")
    return found
