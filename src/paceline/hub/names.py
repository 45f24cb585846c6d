"""What users call models: one grammar for every command, and for Python."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from paceline.hub.catalogue import CATALOGUE
from paceline.hub.default_model import PACKAGED_MODELS

_NAME = re.compile(r"(?P<repo>(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*?)(?::(?P<quant>[A-Za-z0-9][A-Za-z0-9_]*))?",
                   re.ASCII)
_LONGEST = 200
_LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the hub, and which of its GGUF files; without `quant`: its safetensors, or a usual GGUF file."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def hub_name(name: str) -> HubName | None:
    """The repository that a short name, a hub id or either with `:QUANT` stands for. None: it is none of them."""
    found = _NAME.fullmatch(name) if len(name) <= _LONGEST else None
    if found is None:
        return None
    repo, quant = found["repo"], found["quant"]
    entry = CATALOGUE.get(repo.lower())
    if entry is not None:
        return HubName(entry.repo, entry.quant if quant is None else quant.upper())
    # A file's name is no hub's: who writes folder/model.gguf means a file that is not there.
    if "/" not in repo or repo.endswith(".gguf") or ".." in repo:
        return None
    return HubName(repo, None if quant is None else quant.upper())


def short_name(name: HubName) -> str:
    """As the catalogue calls it, if it does; else as the hub does."""
    for entry in CATALOGUE.values():
        if entry.repo == name.repo:
            return entry.name if entry.quant == name.quant else f"{entry.name}:{name.quant}"
    return str(name)


def unknown(name: str) -> str:
    """The sentence for a name that is nothing at all."""
    known = [*PACKAGED_MODELS, *CATALOGUE]
    near = difflib.get_close_matches(name.lower(), known, 3, 0.6) if len(name) <= _LONGEST else []
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    shown = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
    return (f"There is no model '{shown}': it is no folder or .gguf file here and no known short name "
            f"({', '.join(known)}).{hint} Give a path, a short name, or a hub id like owner/name or owner/name:Q4_K_M.")
