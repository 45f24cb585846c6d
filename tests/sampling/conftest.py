"""Pipelines of both kinds: what numpy works out and what native code does obey the same specifications."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from paceline.sampling import Pipeline
from paceline.sampling.native import load


@pytest.fixture(scope="module", params=["numpy", "native"])
def either_sampler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests twice: its `Pipeline` samples in numpy, then natively."""
    native = load() if request.param == "native" else None
    if request.param == "native" and native is None:
        pytest.skip("the native library is not built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request.module, "Pipeline", functools.partial(Pipeline, native=native))
        yield
