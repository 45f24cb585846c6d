"""What the page on security promises is kept by tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tests_that_are_named_exist() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", page)
    assert len(named) > 30
    file = ""
    for path, name in named:
        file = path or file
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
