"""Every fault in every circumstance: at every step boundary where steps are planned ahead in a crowded cache, at some
of them elsewhere, by `make test-full`; a sample in every run."""

from __future__ import annotations

import itertools
import random

import pytest

from faults.cases import CIRCUMSTANCES, STEPS, Case, run_case
from faults.points import DEVICE, POINTS

EVERYWHERE = "crowded ahead"
FAST = ("plain", "ahead", "crowded", EVERYWHERE)


def some(seed: str, count: int) -> list[int]:
    return random.Random(seed).sample(range(STEPS), count)


SAMPLE = [Case(circumstances, point, some(point, 1)[0] % 9)
          for circumstances, point in zip(itertools.cycle(FAST), list(POINTS)[::4])]
FULL = [Case(EVERYWHERE, *cell) for cell in itertools.product(POINTS, range(STEPS))] + [
    Case(circumstances, point, step) for circumstances, point in itertools.product(CIRCUMSTANCES, POINTS)
    for step in some(f"{circumstances} {point}", 2)]
DEVICE_SAMPLE = [Case("device", point, some(point, 1)[0] % 9) for point in list(DEVICE)[::6]]
DEVICE_FULL = [Case(*cell) for cell in itertools.product(("device", "device crowded"), DEVICE, range(0, STEPS, 2))]


@pytest.mark.parametrize("case", SAMPLE + DEVICE_SAMPLE, ids=str)
def test_a_fault_costs_nobody_more_than_it_must(case: Case) -> None:
    run_case(case)


@pytest.mark.full
@pytest.mark.parametrize("case", sorted({*FULL} - {*SAMPLE}, key=str), ids=str)
def test_any_fault_costs_nobody_more_than_it_must(case: Case) -> None:
    run_case(case)


@pytest.mark.full
@pytest.mark.parametrize("case", sorted({*DEVICE_FULL} - {*DEVICE_SAMPLE}, key=str), ids=str)
def test_any_fault_on_a_device_costs_nobody_more_than_it_must(case: Case) -> None:
    run_case(case)


def test_most_faults_come_to_pass() -> None:
    """Otherwise their cases would prove nothing."""
    assert all(run_case(Case("plain", point, 1)) for point in ("forward breaks", "detokenizer", "ModelDrafter propose"))


def test_a_case_that_fails_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faults.cases.judge", lambda *_: pytest.fail("amiss"))
    with pytest.raises(BaseException, match="amiss") as caught:
        run_case(Case("plain", "mask", 4))
    assert any("python -m faults.cases 'plain/mask/4'" in note for note in caught.value.__notes__)
