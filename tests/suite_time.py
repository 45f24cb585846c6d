"""How long tests take: those that take too long are listed, and long matrices may be run for a while only."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import pytest

EXCUSED = frozenset(("slow", "full", "sanitize"))
"""Marks of tests that may take their time."""
LISTED = 10.0
"""Seconds above which another test is listed."""
REFUSED = 240.0
"""Seconds above which one fails the run in CI: a busy machine takes its time."""
UNTIL = "PACELINE_TESTS_UNTIL"
"""Environment: seconds since the epoch after which tests are skipped, chosen by SHUFFLED."""
SHUFFLED = "PACELINE_TESTS_SHUFFLED"
"""Environment: tests run in an order that this text decides."""


class SlowTests:
    """Adds up what each test took, its fixtures included. Where tests run in workers their reports come here too."""

    def __init__(self, strict: bool) -> None:
        """`strict`: a test above REFUSED seconds fails the run."""
        self._strict = strict
        self._seconds = Counter[str]()
        self._excused: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not EXCUSED.isdisjoint(report.keywords):
            self._excused.add(report.nodeid)

    def above(self, seconds: float) -> list[tuple[str, float]]:
        """Tests that took longer and have no excuse, the slowest first."""
        return [(name, taken) for name, taken in self._seconds.most_common()
                if taken > seconds and name not in self._excused]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        if self._strict and session.exitstatus == pytest.ExitCode.OK and self.above(REFUSED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for name, taken in self.above(LISTED):
            terminalreporter.write_line(f"slower than {LISTED:.0f} s: {name} took {taken:.1f} s: make it faster, leave "
                                        "a part of it to the mark `full`, or mark it `slow`")
        if self._strict and self.above(REFUSED):
            terminalreporter.write_line(f"a test without a mark took more than {REFUSED:.0f} s: that fails the run")


class TimeBox:
    """Skips what the time does not suffice for."""

    def __init__(self, until: float) -> None:
        self._until = until

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > self._until:
            pytest.skip("out of time")


def register(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowTests(strict=bool(os.environ.get("CI"))))
    if UNTIL in os.environ:
        config.pluginmanager.register(TimeBox(float(os.environ[UNTIL])))


def shuffle(items: list[pytest.Item]) -> None:
    """The same order in every worker. Tests of one module stay together, whose fixtures they share."""
    if SHUFFLED in os.environ:
        order: dict[str, float] = {}
        chance = random.Random(os.environ[SHUFFLED])
        for item in sorted(items, key=lambda item: item.nodeid):
            order.setdefault(item.nodeid.partition("::")[0], chance.random())
        items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])
