"""The engine under random mixes of everything: each request says what it says alone, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from engine.whole import check_nobody_is_remembered
from fuzz.mixes import Run, check_said, mix

FEW, MANY = range(4), range(4, 204)


def check(seed: int) -> None:
    torch.set_num_threads(1)
    drawn = mix(seed)
    run = Run(drawn)
    outs = run.go()
    for ask, out in zip(drawn.asks, outs, strict=True):
        check_said(drawn.kind, ask, out)
    del outs, out
    run.outs.clear()
    check_nobody_is_remembered(run.engine, set(run.names))


@pytest.mark.parametrize("seed", FEW)
def test_each_request_of_a_mix_says_what_it_says_alone(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_each_request_of_many_mixes_says_what_it_says_alone(seed: int) -> None:
    check(seed)
