"""packing_speed: every block type is packed and multiplied in both ways; wrong types are named."""

from __future__ import annotations

import sys

import pytest

import packing_speed
from paceline.kernels import cpu
from paceline.models.packing import BLOCKS

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here")


def test_every_type_is_measured_in_both_ways() -> None:
    kinds = sorted(BLOCKS)
    rows = packing_speed.measure(kinds, 16, 256, 1)
    assert [row.case for row in rows] == [
        f"{kind}, {way}: {what}" for kind in kinds for way in ("int8", "blocks")
        for what in ("pack", "1 rows", "4 rows", "64 rows")]
    assert all(row.paceline > 0 for row in rows)


def test_an_unknown_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["packing", "--types", "Q4_0,Q9_0"])
    with pytest.raises(SystemExit, match="no block type 'Q9_0': use some of IQ4_NL"):
        packing_speed.main()
