"""Every fault at every step boundary: the whole product by `make test-full`, a sample of it in every run."""

from __future__ import annotations

import itertools
import random

import pytest

from faults.cases import CIRCUMSTANCES, STEPS, Case, run_case
from faults.points import POINTS

ALL = [Case(*cell) for cell in itertools.product(CIRCUMSTANCES, POINTS, range(STEPS))]
SAMPLE = {Case(circumstances, point, random.Random(point).randrange(9)) for circumstances, point in zip(
    itertools.cycle(["plain", "ahead", "crowded", "crowded ahead"]), POINTS)}


@pytest.mark.parametrize("case", [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.full)
                                  for case in ALL], ids=str)
def test_a_fault_costs_nobody_more_than_it_must(case: Case) -> None:
    run_case(case)
