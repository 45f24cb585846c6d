"""tools/package_texts.py: prose comes out of every kind of file, and nothing else."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import pytest

import package_texts

PROSE = "Der Fuchs geht durch den Wald und sieht ein Haus."


def catalogue(texts: dict[str, str]) -> bytes:
    """A .mo file."""
    pairs = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **texts}.items())
    where = 28 + 16 * len(pairs)
    tables, data = [b"", b""], b""
    for side in (0, 1):
        for pair in pairs:
            raw = pair[side].encode()
            tables[side] += struct.pack("<II", len(raw), where + len(data))
            data += raw + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + tables[0] + tables[1] + data


def lines_of(patch: pytest.MonkeyPatch, path: Path, *more: str) -> list[str]:
    out = path.parent / "out.txt.gz"
    patch.setattr(sys, "argv", ["texts", str(path), "--out", str(out), *more])
    package_texts.main()
    return gzip.decompress(out.read_bytes()).decode().splitlines()


def test_catalogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    english = "The fox walks through the forest and it sees a house."
    path = tmp_path / "a.mo"
    path.write_bytes(catalogue({english: PROSE, "story\x04" + english + " It is a nice one.": f"{PROSE}\n\n{PROSE}",
                                "Save the %s files of the fox now.": "Die %s Dateien und das alles ist nun da.",
                                "It is not translated, and so it is in English.":
                                    "It is not translated, and so it is in English."}))
    assert lines_of(monkeypatch, path, "--language", "de") == [PROSE]
    assert sorted(lines_of(monkeypatch, path, "--language", "en", "--originals")) == [
        "It is not translated, and so it is in English.", english, f"{english} It is a nice one."]


@pytest.mark.parametrize(("name", "content"), [
    ("a.html", f"<h1>Der Titel ist das hier und nicht mehr.</h1><p class='x'>{PROSE[:20]}<b>{PROSE[20:]}</b></p>"
               "<p>foo --bar ist das und nicht ein Satz der</p>"),
    ("a.page", f"<page><p>\n {PROSE.replace(' und ', ' und' + chr(10))}</p></page>"),
    ("ding", f"# Kopf\nFuchs {{m}} [zool.] | {PROSE[:-1]} [ugs.]. | der Fuchs; das Tier :: fox | It walks.\n"),
])
def test_pages_and_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert lines_of(monkeypatch, tmp_path / name, "--language", "de") == [PROSE]


def test_entries_of_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "It is one of the things that are in this book, and {here} it is said\n   what it is for. " * 4
    path = tmp_path / "a.dict.dz"
    entries = f"short\n\n   {{see that}}\n\nthing\n\n   <tool> {said}\n\n   (1995-02-07)\n\n"
    path.write_bytes(gzip.compress(entries.encode()))
    line, = lines_of(monkeypatch, path, "--language", "en")
    assert line.startswith("Thing: It is one of the things that are in this book, and here it is said what")
