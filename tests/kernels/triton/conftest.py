"""Where the Triton kernels' tests run: on the card where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

CARD = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not CARD:
    # Triton reads it when it is imported, which without a card nobody but its tests does.
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", params=[pytest.param("cuda", marks=pytest.mark.gpu) if CARD else "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with pytest.MonkeyPatch.context() as patch:
        if not CARD:
            from quick_interpreter import quicken
            quicken(patch)
        yield torch.device(request.param)


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
