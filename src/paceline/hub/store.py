"""What models are on this machine: those pulled, those that come through pip, and those that the hub's own client has.

A pulled model is a folder `hub/OWNER/NAME/VARIANT` of the cache. It is whole when its `.pulled.json`, which is written
last, names files that are all there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, ModelNotFoundError
from paceline.hub.cache import cache_dir, folder_bytes, locked
from paceline.hub.default_model import PACKAGED_MODELS, list_cached
from paceline.hub.listing import PREFERRED, SAFETENSORS, quant_of
from paceline.hub.names import HubName, hub_name, short_name, unknown

MANIFEST = ".pulled.json"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of which this machine has something."""

    name: str
    """What commands call it."""
    path: Path
    """What the engine opens."""
    bytes: int
    ready: bool
    folder: Path
    """All that there is of it."""
    hub: HubName | None = None
    """Where it is from; None: through pip."""
    own: bool = True
    """Paceline fetched it, so that it may remove it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of the hub: repo, commit, licence."""


def pulled_folder(name: HubName, variant: str) -> Path:
    return cache_dir() / "hub" / name.repo / variant


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What was pulled into `folder`; None: nothing whole is there."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if files and all((folder / name).stat().st_size == about["bytes"] for name, about in files.items()):
            return dict(manifest)
    return None


def opened(folder: Path) -> Path:
    """What the engine opens of a variant's folder: that, or its GGUF file."""
    return folder if folder.name == SAFETENSORS else next(iter(sorted(folder.glob("*.gguf"))), folder)


def find_local(name: HubName) -> Path | None:
    """Where the model lies that `name` means, if it is here whole."""
    order = [name.quant] if name.quant is not None else [SAFETENSORS, *PREFERRED]
    here = {folder.name: folder for folder in _folders(cache_dir() / "hub" / name.repo)
            if read_manifest(folder) is not None}
    for variant in (*order, *(sorted(here) if name.quant is None else ())):
        if variant in here:
            return opened(here[variant])
    return _in_hubs_cache(name)


def here(name: str) -> Path | None:
    """Where the model of this name lies: a path, or what has been pulled or fetched by the hub's own client; None: it
    is not here."""
    with suppress(OSError, RuntimeError, ValueError):  # a name too long for a file, a folder that may not be read, ...
        path = Path(name).expanduser()
        if name and (path.is_dir() or path.is_file()):
            return path
    wanted = hub_name(name)
    return None if wanted is None else find_local(wanted)


def local_models() -> list[LocalModel]:
    """All there are, whole or not."""
    found = [LocalModel(one.name, one.path, one.bytes, one.ready, one.path.parent) for one in list_cached()]
    found += [_pulled(f"{owner.name}/{repo.name}", folder) for owner in _folders(cache_dir() / "hub")
              for repo in _folders(owner) for folder in _folders(repo)]
    return found + [_cached(folder) for folder in _hub_folders()]


def _pulled(repo: str, folder: Path) -> LocalModel:
    name = HubName(repo, None if folder.name == SAFETENSORS else folder.name)
    manifest = read_manifest(folder)
    return LocalModel(short_name(name), opened(folder), folder_bytes(folder), manifest is not None, folder, name,
                      about=manifest or {})


def remove(name: str) -> tuple[str, int]:
    """Delete a fetched model: its name and how many bytes that freed. One that is being fetched is waited for."""
    wanted = hub_name(name)
    known = local_models()
    chosen = [model for model in known if model.own and (
        model.name == name.lower() if model.hub is None else
        wanted is not None and model.hub.repo == wanted.repo and wanted.quant in (None, model.hub.quant))]
    if len(chosen) > 1:
        raise ConfigError(f"'{name}' is here more than once ({', '.join(model.name for model in chosen)}): say which.")
    if not chosen:
        if any(model.name == name for model in known):
            raise ConfigError(f"'{name}' is in the cache of the hub's own client, which other programs share: remove "
                              "it with that.")
        if wanted is None and name.lower() not in PACKAGED_MODELS:
            raise ModelNotFoundError(unknown(name))
        raise ModelNotFoundError(f"There is nothing of '{name}' to remove; `paceline list` tells what is here.")
    model = chosen[0]
    try:
        with locked(model.folder / ("lock" if model.hub is None else LOCK)):
            freed = folder_bytes(model.folder)
            # The note that makes it whole goes first: whoever is interrupted leaves no half that looks whole.
            for note in (MANIFEST, "verified.json"):
                (model.folder / note).unlink(missing_ok=True)
            shutil.rmtree(model.folder)
    except OSError as problem:
        raise ConfigError(f"'{name}' cannot be removed from {model.folder} ({problem.strerror}): check who may write "
                          "there.") from None
    for above in (model.folder.parent, model.folder.parent.parent):
        with suppress(OSError):  # not empty
            if above != cache_dir():
                above.rmdir()
    return model.name, freed


def _folders(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))


# ---- what the hub's own client has fetched for other programs ----

def hubs_cache() -> Path:
    """Where that client keeps what it fetches: HF_HUB_CACHE, or below HF_HOME."""
    own = os.environ.get("HF_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    home = os.environ.get("HF_HOME") or (Path(shared) if shared else Path.home() / ".cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _hub_folders() -> Iterator[Path]:
    return (folder for folder in _folders(hubs_cache()) if folder.name.startswith("models--"))


def _snapshot(folder: Path) -> Path | None:
    with suppress(OSError, UnicodeDecodeError):
        place = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        return place if place.is_dir() else None
    return None


def _in_hubs_cache(name: HubName) -> Path | None:
    place = _snapshot(hubs_cache() / f"models--{name.repo.replace('/', '--')}")
    if place is None:
        return None
    if name.quant is None and _is_whole(place):
        return place
    files = {quant_of(file.name): file for file in sorted(place.glob("*.gguf")) if file.is_file()}
    wanted = [name.quant] if name.quant is not None else [*PREFERRED, *files]
    return next((files[quant] for quant in wanted if quant in files), None)


def _is_whole(place: Path) -> bool:
    """Whether all weights are there: others fetch a config or a tokenizer alone."""
    index = place / "model.safetensors.index.json"
    try:
        if index.is_file():
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((place / str(part)).is_file() for part in parts)
        return any(file.is_file() for file in place.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _cached(folder: Path) -> LocalModel:
    name = HubName(folder.name.removeprefix("models--").replace("--", "/", 1))
    place = _in_hubs_cache(name)
    size = folder_bytes(folder / "blobs") if (folder / "blobs").is_dir() else folder_bytes(folder)
    return LocalModel(name.repo, place or folder, size, place is not None, folder, name, own=False)
