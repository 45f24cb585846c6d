"""A tiny model for the tests of a cluster, and one engine with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import write_model

from paceline import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """One engine in this process: what everybody should answer."""
    return LLM(str(folder), deterministic=True)
