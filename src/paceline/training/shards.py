"""Texts on disk: shards that are only ever added, and a manifest that says which of them are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError, ModelFormatError
from paceline.models.load.reading import check_stored, read_object, reading

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it."""

    index: int
    """Of its job."""
    tokens: np.ndarray
    """[n] int32, prompt first."""
    prompt: int
    """Tokens of the prompt."""

    @property
    def answer(self) -> int:
        return len(self.tokens) - self.prompt


Packed = dict[str, np.ndarray]
"""Texts in four arrays, as they lie on disk and travel between processes."""


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def pack(texts: list[Text], dtype: type[np.unsignedinteger[Any]]) -> Packed:
    flat = [text.tokens for text in texts] or [np.zeros(0, np.int32)]
    return {"tokens": np.concatenate(flat).astype(dtype),
            "lengths": np.array([len(text.tokens) for text in texts], np.int32),
            "prompts": np.array([text.prompt for text in texts], np.int32),
            "indexes": np.array([text.index for text in texts], np.int64)}


def unpack(packed: Packed) -> list[Text]:
    tokens, ends = packed["tokens"].astype(np.int32), np.cumsum(packed["lengths"])
    sizes = zip(ends.tolist(), packed["lengths"].tolist(), packed["prompts"].tolist(), packed["indexes"].tolist())
    return [Text(index, tokens[end - length:end], prompt) for end, length, prompt, index in sizes]


def _check(packed: Packed) -> None:
    """Whether the arrays of a file make texts."""
    lengths, prompts = packed["lengths"], packed["prompts"]
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in packed.values()) \
            or not len(lengths) == len(prompts) == len(packed["indexes"]) \
            or bool((prompts < 0).any() or (lengths < prompts).any()) or int(lengths.sum()) != len(packed["tokens"]):
        raise ValueError("its lengths are not those of its texts")


@dataclass(frozen=True)
class Manifest:
    """Which texts a folder holds, and how they were made."""

    folder: Path
    settings: dict[str, Any]
    shards: list[dict[str, Any]]

    def read(self) -> Iterable[Text]:
        """All texts, in the order in which they were added."""
        for entry in self.shards:
            path = self.folder / entry["file"]
            check_stored(path)
            with reading(path, remedy="remove it, or have it made again"):
                with np.load(path) as data:
                    packed = {name: data[name] for name in ("tokens", "lengths", "prompts", "indexes")}
                _check(packed)
            yield from unpack(packed)


def read_manifest(folder: Path, remedy: str) -> Manifest:
    """Of shards that are all there. `remedy`: what to do where they are not."""
    path = folder / MANIFEST
    try:
        with reading(path):
            found = read_object(path)
            manifest = Manifest(folder, dict(found["settings"]), list(found["shards"]))
            entries = [(str(entry["file"]), int(entry["bytes"])) for entry in manifest.shards]
            left_out = [index for entry in manifest.shards for index in entry["left_out"]]
            if any(not isinstance(index, int) for index in left_out) \
                    or any(Path(name).name != name for name, _ in entries):
                raise ValueError("it names files of other folders, or what is no number as left out")
    except ModelFormatError as error:
        raise ConfigError(f"{path} cannot be read ({error}): {remedy}") from None
    for name, size in entries:
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise ConfigError(f"{file} is missing or cut short: {remedy}")
    return manifest


class Shards:
    """A folder of texts. What was broken off while it was written is as if it had never begun."""

    def __init__(self, folder: Path, settings: dict[str, Any], vocab_size: int) -> None:
        """Opens what is there; `settings` must be those it was made with."""
        self.folder = folder
        self._dtype = token_dtype(vocab_size)
        self._manifest = Manifest(folder, settings, [])
        self.done: set[int] = set()
        """Jobs that are there, or were left out."""
        make_folder(folder)
        if (folder / MANIFEST).exists():
            self._open(settings)

    def _open(self, settings: dict[str, Any]) -> None:
        self._manifest = read_manifest(self.folder, f"remove the folder {self.folder} to make its texts again.")
        found = self._manifest.settings
        other = sorted(name for name in {*settings, *found} if settings.get(name) != found.get(name))
        if other:
            raise ConfigError(f"The texts in {self.folder} were made with other settings ({', '.join(other)}): use the "
                              "same ones, or another --out.")
        for text in self.read():
            self.done.add(text.index)
        for entry in self._manifest.shards:
            self.done.update(entry["left_out"])

    def read(self) -> Iterable[Text]:
        """All texts, in the order in which they were added."""
        return self._manifest.read()

    def add(self, texts: list[Text], left_out: list[int]) -> None:
        """Written as a new shard; on disk when this returns."""
        if not texts and not left_out:
            return
        name = f"shard-{len(self._manifest.shards):05}.npz"
        arrays = pack(texts, self._dtype)

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]

        replace_file(self.folder / name, write)
        entry = {"file": name, "bytes": (self.folder / name).stat().st_size, "texts": len(texts),
                 "tokens": int(arrays["lengths"].sum()), "left_out": left_out}
        manifest = replace(self._manifest, shards=[*self._manifest.shards, entry])
        content = {"settings": manifest.settings, "shards": manifest.shards}
        replace_file(self.folder / MANIFEST, lambda path: _write_json(path, content))
        self._manifest = manifest
        self.done.update([text.index for text in texts], left_out)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {folder}: {error.strerror}; name another one with --out.") from None


def replace_file(path: Path, write: Any) -> None:
    """`write(a path beside it)`, then the new file takes the old one's place at once: whoever looks sees one of them,
    whole. If writing fails the old one stays."""
    beside = path.with_name(f".{path.name}.new")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(f"Cannot write {path} ({error.strerror or error}): make room there, or name another --out. "
                          "What was written before is unharmed.") from None
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
