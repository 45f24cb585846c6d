"""Slots of adapters: every weight has as many as there are, whenever it came."""

from __future__ import annotations

import torch

from paceline.kernels.low_rank import AdapterSlots, LowRank


def test_a_weight_that_comes_late_has_a_place_for_everybody() -> None:
    one, two = torch.zeros(8, 4), torch.zeros(6, 4)
    low = {weight: LowRank(torch.ones(2, 4), torch.ones(weight.shape[0], 2)) for weight in (one, two)}
    slots = AdapterSlots()
    assert [slots.load({one: low[one]}) for _ in range(5)] == [0, 1, 2, 3, 4]
    slots.free(0)
    assert slots.load(low) == 0
    tables = [slots.get(weight) for weight in (one, two)]
    assert all(table is not None and table.down.shape[0] > 4 for table in tables)
