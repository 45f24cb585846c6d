"""Texts that users give: UTF-8 files, plain or packed with gzip, taken whole and therefore no longer than fits."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from paceline.errors import ConfigError

MOST_BYTES = 1 << 29
"""Of one file, unpacked. A .gz says nothing of what is in it that could be believed."""


def read_text(path: str | Path) -> str:
    """A ConfigError says what is wrong with the file, and where."""
    path, raw = Path(path), b""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ConfigError(f"{path} holds more than {MOST_BYTES >> 20} MB of text: give it in several files, or "
                              "leave some of it out.")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text (byte {error.start}): convert it or leave it out."
                          ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise ConfigError(f"{path} is no whole .gz file of UTF-8 text: fetch it again, or leave it out.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}; give a UTF-8 file, plain or .gz.") from None
