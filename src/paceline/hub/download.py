"""One file from the hub: gone on with where it broke off, checked, and whole or not there.

What has come lies in `.NAME.part`, and `.NAME.part.json` says what of; nobody takes either for the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError
from paceline.hub.cache import silent
from paceline.hub.client import Broken, Hub, NoSuchRange, Tries, read
from paceline.hub.listing import HubFile

_CHUNK = 1 << 20
Hears = Callable[[str, int, int], None]


class Part:
    """What is here of a file. Bytes left by an earlier try count if they are of the same content."""

    def __init__(self, folder: Path, file: HubFile, report: Hears = silent) -> None:
        self.file = file
        self.path = folder / f".{file.name}.part"
        self._note = folder / f".{file.name}.part.json"
        self._digest = hashlib.sha256()
        self.done = 0
        self.etag: str | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(self._note.read_text(encoding="utf-8"))
            if noted["content"] == self._content and self.path.stat().st_size <= file.bytes:
                self.etag = noted["etag"]
                self._take_up(report)

    @property
    def _content(self) -> list[Any]:
        return [self.file.bytes, self.file.sha256 or self.file.oid]

    def _take_up(self, report: Hears) -> None:
        with open(self.path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                self._digest.update(chunk)
                self.done += len(chunk)
                report("verify", self.done, self.file.bytes)

    @property
    def missing(self) -> int:
        return self.file.bytes - self.done

    @property
    def may_go_on(self) -> bool:
        """Whether a further piece can be told to be of the same content: by its ETag now, or by the checksum later."""
        return self.done > 0 and (self.etag is not None or self.file.sha256 is not None)

    def restart(self, etag: str | None) -> None:
        self.path.write_bytes(b"")
        self._digest, self.done, self.etag = hashlib.sha256(), 0, etag
        self._note.write_text(json.dumps({"content": self._content, "etag": etag}), encoding="utf-8")

    def add(self, chunks: Callable[[], bytes], heard: Callable[[], None]) -> None:
        """Write what comes, until it ends or is more than it should be."""
        with open(self.path, "ab") as stream:
            while chunk := chunks():
                if len(chunk) > self.missing:
                    self.discard()
                    raise ModelFormatError(f"The hub sent more of {self.file.name} than the {self.file.bytes:,} bytes "
                                           "that it has: pull it again, or check HF_ENDPOINT.")
                stream.write(chunk)
                self._digest.update(chunk)
                self.done += len(chunk)
                heard()

    def check(self) -> None:
        """The whole: on disk, and what the hub said it would be."""
        if self.file.sha256 not in (None, self._digest.hexdigest()):
            self.discard()
            raise ModelFormatError(f"{self.file.name} came damaged (its checksum is not the one that the hub tells): "
                                   "pull it again.")
        with open(self.path, "ab") as stream:
            os.fsync(stream.fileno())

    def move_to(self, target: Path) -> None:
        os.replace(self.path, target)
        self._note.unlink(missing_ok=True)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


def complete(hub: Hub, where: str, part: Part, of: str, heard: Callable[[], None]) -> None:
    """Fetch what is missing of `part`. `heard` is called whenever more has come."""
    tries = Tries(hub.sleep)
    if not part.done:
        part.restart(None)
    while part.missing:
        before = part.done
        try:
            _go_on(hub, where, part, of, heard)
        except Broken as problem:
            if part.done > before:
                tries.worked()
            tries.failed(problem, f"{part.file.name} of '{of}' could not be fetched from {hub.host}")
    part.check()


def _go_on(hub: Hub, where: str, part: Part, of: str, heard: Callable[[], None]) -> None:
    asked: dict[str, str] = {}
    if part.may_go_on:
        asked["Range"] = f"bytes={part.done}-"
        if part.etag is not None and not part.etag.startswith("W/"):
            asked["If-Range"] = part.etag
    elif part.done:
        part.restart(None)
    try:
        reply = hub.open(where, of, asked)
    except NoSuchRange:  # not the same content
        part.restart(None)
        raise
    with reply:
        etag = reply.headers.get("ETag")
        if reply.status != 206:
            part.restart(etag)
        elif not _continues(reply.headers.get("Content-Range"), part, etag):
            part.restart(None)
            raise Broken("what is there now is another file than before")
        part.add(lambda: read(reply, _CHUNK), heard)
    if part.missing:
        raise Broken("the connection broke off")


def _continues(span: str | None, part: Part, etag: str | None) -> bool:
    """Whether an answer to Range is what comes next of the same content."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", span or "")
    return (found is not None and int(found[1]) == part.done and found[2] in ("*", str(part.file.bytes))
            and (part.etag is None or etag is None or etag == part.etag))
