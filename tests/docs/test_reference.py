"""docs/reference.md is what tools/reference.py makes of the code."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from docs.test_examples import ROOT

TOOL = ROOT / "tools" / "reference.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(tool: ModuleType) -> None:
    page = Path(tool.PAGE)
    assert page.read_text() == tool.reference(), (
        "docs/reference.md is out of date: run `PYTHONPATH=src python tools/reference.py`")


def test_everything_has_its_row(tool: ModuleType) -> None:
    page = tool.reference()
    for name in ("`max_batch_tokens`", "`min_p`", "`--stall-timeout`", "`library_tokens`", "`GrammarError`",
                 "### paceline bench spec", "`/v1/chat/completions`", "`guided_regex`", "`without-replacement`"):
        assert name in page, name


def test_a_field_without_words_is_refused(tool: ModuleType) -> None:
    @dataclass
    class Options:
        told: int = 1
        """What it is."""
        silent: int = 2

    assert tool.field_docs(Options) == {"told": "What it is."}
    with pytest.raises(SystemExit, match="silent"):
        list(tool.field_rows(Options))


def test_options_are_found_where_builders_hand_them_on(tool: ModuleType) -> None:
    found = {name: (kind, default, bounds) for name, kind, default, bounds in
             tool.read_options(tool.spec.BUILDERS["cascade"])}
    assert {"drafter", "by", "small_k"} <= set(found)
    assert found["small_k"] == ("int", "4", "1, 1024")
    assert "min_confidence" in {name for name, *_ in tool.read_options(tool.spec.BUILDERS["draft"])}
