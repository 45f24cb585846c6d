"""Triton's kernels, fast and deterministic."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
def kernels(request: pytest.FixtureRequest, device: torch.device):
    from paceline.kernels.triton import load
    made = load(request.param, device)
    yield made
    assert not made._arrived.any(), "a kernel left its counters dirty"


@pytest.fixture
def exact(device: torch.device):
    """The deterministic kernels alone."""
    from paceline.kernels.triton import load
    return load(True, device)
