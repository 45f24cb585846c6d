"""The cut of long products, and the list of slow tests."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pairwise import cut, each, pairs, pairwise
from suite_time import SlowTests


@pytest.mark.parametrize("sizes", [(20, 3, 3), (4, 2, 2, 2), (2, 5), (3,), (1, 1, 4)])
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    kept = cut(sizes)
    wanted = {pair for cell in itertools.product(*map(range, sizes)) for pair in pairs(cell)}
    assert {pair for cell in kept for pair in pairs(cell)} == wanted
    largest = sorted(sizes)[-2:]
    assert len(kept) <= 1.5 * largest[0] * largest[-1]


def test_what_is_not_kept_is_run_with_the_long_matrices() -> None:
    names, params = pairwise(size=[1, 2, 3], kind={"a": "x", "b": "y"}, way=[True, False]).args
    assert names == ("size", "kind", "way") and len(params) == 12
    assert params[0].id == "1-a-True" and params[0].values == (1, "x", True)
    assert sum(not param.marks for param in params) == 6


def test_each_value_is_met() -> None:
    _, params = each(size=[1, 2, 3], kind=["a", "b"]).args
    assert [param.id for param in params if not param.marks] == ["1-a", "2-b", "3-a"] and len(params) == 6


class Report:
    def __init__(self, nodeid: str, duration: float, *marks: str) -> None:
        self.nodeid, self.duration, self.keywords = nodeid, duration, dict.fromkeys(marks, 1)


@pytest.mark.parametrize(("strict", "longest", "status"), [(True, 241.0, 1), (True, 29.0, 0), (False, 241.0, 0)])
def test_slow_tests_are_listed_and_fail_a_strict_run(strict: bool, longest: float, status: int) -> None:
    watching: Any = SlowTests(strict)
    for report in (Report("a", 6.0), Report("a", longest - 6.0), Report("b", 50.0, "slow"), Report("c", 70.0, "full"),
                   Report("d", 12.0), Report("e", 9.0)):
        watching.pytest_runtest_logreport(report)
    assert [name for name, _ in watching.above(10.0)] == ["a", "d"]

    class Session:
        exitstatus = pytest.ExitCode.OK

    session = Session()
    watching.pytest_sessionfinish(session)
    assert session.exitstatus == status
    lines: list[str] = []

    class Terminal:
        write_line = staticmethod(lines.append)

    watching.pytest_terminal_summary(Terminal())
    assert len(lines) == 2 + status and lines[0].startswith(f"slower than 10 s: a took {longest:.1f} s")
