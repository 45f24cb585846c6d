"""Reading files that somebody else wrote: no larger in memory than they are on disk, and every fault a sentence."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError, PacelineError

MOST_TEXT_BYTES = 1 << 28
"""Of a file that is parsed whole. The largest there are, indexes and tokenizers, have a tenth of it."""
MOST_LEVELS = 100


@contextmanager
def reading(path: Path, fault: str = "is truncated or corrupt", remedy: str = "download it again") -> Iterator[None]:
    """Whatever is raised on a malformed file becomes a ModelFormatError that names it, panics of libraries in Rust
    included, which are no Exceptions."""
    try:
        yield
    except PacelineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        said = str(error).strip()[:200] or type(error).__name__
        raise ModelFormatError(f"{path} {fault} ({said}): {remedy}.") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has given up. Its class is not to be had by a name."""
    return type(error).__name__ == "PanicException"


def read_text(path: Path) -> str:
    """A file that is taken whole, as UTF-8."""
    with reading(path, "cannot be read", "check the file"):
        size = path.stat().st_size
        if not path.is_file() or size > MOST_TEXT_BYTES:
            raise ModelFormatError(f"{path} is no plain file of at most {MOST_TEXT_BYTES >> 20} MB (it has {size:,} "
                                   "bytes): download it again.")
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """Parse a JSON file of a model; ModelFormatError names it when it is broken."""
    with reading(path, "is not readable JSON"):  # numbers too long and the deepest nesting among it
        found = json.loads(read_text(path))
        level, depth = [found], 0
        while level:  # whoever takes it up again, to show it or to write it, has a stack that ends somewhere
            depth += 1
            if depth > MOST_LEVELS:
                raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
            level = [inner for one in level if isinstance(one, dict | list)
                     for inner in (one.values() if isinstance(one, dict) else one)]
        return found


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ModelFormatError(f"{path} does not hold an object: download it again.")
    return found


def check_stored(path: Path) -> None:
    """Refuse an archive (.npz, and torch's .pt) whose members say that they are larger than the file: tensors are
    stored as they are, and only what is meant to fill a memory is packed so well."""
    if not zipfile.is_zipfile(path):
        return
    with reading(path), zipfile.ZipFile(path) as archive:
        claimed, size = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if claimed > size:
        raise ModelFormatError(f"{path} has {size:,} bytes and would unpack to {claimed:,}: tensors are stored as they "
                               "are, so something else is in it; download it again.")
