"""docs/architecture.md has a line for every folder, and names none that is not there."""

from __future__ import annotations

import re

from docs.test_examples import ROOT

SOURCE = ROOT / "src" / "paceline"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
LISTED = re.findall(r"^\| `([\w/]+)/` \|", TEXT, re.MULTILINE)


def test_every_package_has_a_line() -> None:
    packages = {str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("__init__.py")} - {"."}
    assert packages <= set(LISTED), packages - set(LISTED)


def test_every_folder_listed_exists() -> None:
    assert [name for name in LISTED if not ((SOURCE / name).is_dir() or (ROOT / name).is_dir())] == []


def test_every_file_named_by_its_path_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", TEXT))
    assert [name for name in sorted(named) if not ((SOURCE / name).is_file() or (ROOT / name).is_file())] == []
