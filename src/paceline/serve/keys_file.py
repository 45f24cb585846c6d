"""A file of keys: each with what it may do, and how much."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.serve.quotas import Quota

QUOTAS = tuple(one.name for one in fields(Quota))
FIELDS = ("key", "operator", *QUOTAS)


@dataclass(frozen=True)
class KeysFile:
    clients: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By key."""


def read_keys(path: Path, usual: Quota) -> KeysFile:
    """TOML: a table `[[keys]]` for each. What one does not say of its quota is as usual."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"The keys in {path} cannot be read ({problem.strerror}): name a file that can.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The keys in {path} are not TOML ({problem}): correct the file.") from None
    entries = content.get("keys")
    if not isinstance(entries, list) or not entries or set(content) != {"keys"}:
        raise ConfigError(f"{path} must hold a table [[keys]] for each key, and nothing else.")
    clients: list[str] = []
    operators: list[str] = []
    quotas: dict[str, Quota] = {}
    for place, entry in enumerate(entries, 1):
        key = _checked(entry, f"Key {place} of {path}")
        if key in quotas:
            raise ConfigError(f"Key {place} of {path} is there twice: remove one.")
        (operators if entry.get("operator") else clients).append(key)
        quotas[key] = replace(usual, **{name: entry[name] for name in QUOTAS if name in entry})
    return KeysFile(tuple(clients), tuple(operators), quotas)


def _checked(entry: Any, where: str) -> str:
    """The key of an entry that makes sense. Errors name its place: a key belongs in no log."""
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        raise ConfigError(f'{where} has no key = "...": give it one.')
    for name in entry:
        if name not in FIELDS:
            raise ConfigError(f"{where} says {name!r}, which means nothing here; known are {', '.join(FIELDS)}.")
    if not isinstance(entry.get("operator", False), bool):
        raise ConfigError(f"{where}: operator must be true or false.")
    return str(entry["key"])
