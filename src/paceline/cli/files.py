"""Files that a person names, and what is piped in: read in bounds, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from paceline.errors import ConfigError, RequestError


def named(text: str) -> Path:
    """The path of this name, with ~ written out."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise RequestError(f"{text!r} begins with a user's name that is not known here: write the whole "
                           "path.") from None
    if "\0" in text:
        raise RequestError(f"{text!r} is no name of a file: it holds a NUL.")
    return path


def read_bytes(path: Path, most: int) -> bytes:
    """At most one byte more than `most`, by which whoever asks can tell that there are more: some files never end."""
    with open(path, "rb") as file:
        return file.read(most + 1)


def write_whole(path: Path, text: str) -> None:
    """Whole, or not at all: where there is no room for it, a file that was there stays."""
    ordinary = path.is_file() or not path.exists()  # a pipe or a terminal cannot be replaced
    place = path.resolve()
    target = place.with_name(f".{place.name}.new") if ordinary else path
    try:
        target.write_text(text, encoding="utf-8")
        if ordinary:
            target.replace(place)
    except BaseException:
        if ordinary:
            target.unlink(missing_ok=True)
        raise


def read_piped(stream: TextIO | None) -> str:
    """All that was piped in."""
    if stream is None:
        return ""
    try:
        return checked(stream.read())
    except UnicodeDecodeError as problem:
        raise not_text(problem.encoding, problem.reason) from None


def half_characters(text: str) -> bool:
    """Whether there are some (lone surrogates): no model reads and no file holds them."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def checked(text: str) -> str:
    """Text that came in, if it is some: in some locales Python makes half characters of bytes that are none."""
    if half_characters(text):
        raise not_text("utf-8", "some bytes stand for no character")
    return text


def not_text(encoding: str, reason: str) -> ConfigError:
    return ConfigError(f"What was piped in is not {encoding} text ({reason}): convert it first.")
