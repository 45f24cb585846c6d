"""Checkpoints: everything that a run needs to go on as if it had never stopped, in one file, whole or not there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError, ModelFormatError
from paceline.models.load.reading import check_stored, reading
from paceline.training.shards import replace_file

NAME = "checkpoint.pt"
VERSION = 1


def save(folder: Path, state: dict[str, Any]) -> None:
    """If there is no room for it, the one before it stays."""
    buffer = io.BytesIO()
    torch.save(state | {"version": VERSION}, buffer)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(buffer.getbuffer())

    replace_file(folder / NAME, write)


def load(folder: Path, settings: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """None: there is none. A ConfigError where it cannot be gone on from with these settings."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with reading(path):
            check_stored(path)
            state = torch.load(path, map_location=device, weights_only=True)
    except ModelFormatError as error:
        raise ConfigError(f"{path} is no whole checkpoint ({str(error).splitlines()[0]}): remove it to begin again, or "
                          "name another --out.") from None
    if not isinstance(state, dict) or state.get("version") != VERSION or not isinstance(state.get("settings"), dict):
        raise ConfigError(f"{path} is not a checkpoint of this version: remove it to begin again.")
    other = sorted(name for name, value in settings.items() if state["settings"].get(name) != value)
    if other:
        raise ConfigError(f"{path} was written with other settings ({', '.join(other)}): use the same ones to go on, "
                          "or name another --out.")
    return state
