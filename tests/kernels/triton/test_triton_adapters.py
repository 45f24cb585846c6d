"""Adapters on the Triton kernels: fused products with additions, beside rows that have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.kernels.adapted import NOBODY, LowRank, RowAdapters, adapted
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.triton import launch, load

HIDDEN, HEADS, DIM = 32, Heads(2, 1, 16), 16
OWNERS = np.array([NOBODY, 0, 1])


class Layer:
    """Weights, two adapters (the second leaves the feed-forward alone), inputs, and what they come to by hand."""

    def __init__(self, device: torch.device) -> None:
        luck = torch.Generator().manual_seed(3)

        def values(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=luck) * gain).to(device)

        self.device = device
        self.qkv, self.gate_up = values(64, HIDDEN, gain=0.1), values(64, HIDDEN, gain=0.1)
        self.out = values(HIDDEN, HIDDEN, gain=0.1)
        self.norm = Norm(1 + values(HIDDEN, gain=0.1), 1e-5)
        self.x, self.residual = values(3, HIDDEN), values(3, HIDDEN)
        angles = torch.arange(3)[:, None] * torch.ones(1, DIM // 2) * 0.3
        self.cos = torch.cat([angles.cos()] * 2, -1)[:, None].to(device)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None].to(device)
        self.adapters = [{weight: LowRank(values(16, HIDDEN, gain=0.1), values(weight.shape[0], 16, gain=0.1))
                          for weight in weights}
                         for weights in ((self.qkv, self.gate_up, self.out), (self.qkv, self.out))]

    def run(self, kernels: Kernels, rows: list[int], merged: int = NOBODY) -> dict[str, torch.Tensor]:
        """Every op on these rows; `merged`: with that adapter's additions in the weights."""
        def weight(own: torch.Tensor) -> torch.Tensor:
            low = self.adapters[merged].get(own) if merged != NOBODY else None
            return own if low is None else own + low.up @ low.down

        cache = KVCache(*(torch.zeros(4, 1, DIM, device=self.device) for _ in range(2)))
        x, slots = self.x[rows], torch.arange(len(rows), device=self.device)
        q = kernels.project(x, self.norm, weight(self.qkv), None, HEADS, self.cos[rows].contiguous(),
                            self.sin[rows].contiguous(), cache, slots)
        return {"q": q, "k": cache.keys[:len(rows)], "v": cache.values[:len(rows)],
                "gated": kernels.gated(x, self.norm, weight(self.gate_up), None),
                "linear": kernels.linear(x, weight(self.out)),
                "linear_add": kernels.linear_add(x, weight(self.out), None, self.residual[rows].clone()),
                "head": kernels.head(x, self.norm, weight(self.out))}

    def adapted(self, kernels: Kernels, rows: list[int]) -> dict[str, torch.Tensor]:
        return self.run(adapted(kernels, RowAdapters(self.adapters, OWNERS[rows]), self.device), rows)


EVERYBODY = [0, 1, 2]


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rows_get_their_own_additions(device: torch.device, deterministic: bool) -> None:
    layer, kernels = Layer(device), load(deterministic, device)
    got = layer.adapted(kernels, EVERYBODY)
    for row, owner in enumerate(OWNERS):
        want = layer.run(kernels, EVERYBODY, owner)
        for name, values in got.items():
            torch.testing.assert_close(values[row], want[name][row], atol=1e-4, rtol=1e-4, msg=lambda text, name=name:
                                       f"{name}: {text}")


def test_company_does_not_show(exact: Any, device: torch.device) -> None:
    """Rows without an adapter get what the plain kernels give, and the others what they get alone, to the bit."""
    layer = Layer(device)
    together, plain = layer.adapted(exact, EVERYBODY), layer.run(exact, EVERYBODY)
    for row, owner in enumerate(OWNERS):
        alone = layer.adapted(exact, [row])
        for name, values in together.items():
            assert torch.equal(values[row], alone[name][0]), (row, name)
            if owner == NOBODY:
                assert torch.equal(values[row], plain[name][row]), (row, name)


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 65, 576, 2048, 4096])
def test_what_is_fetched_ahead_is_whole_lines(columns: int) -> None:
    """The factors of an adapter have rows shorter than a line of the cache, and no kernel can fetch a part of one."""
    fetched = launch.fetched(torch.empty(4, columns, dtype=torch.bfloat16))
    assert fetched % launch.LINE == 0
    assert (fetched >= columns) == (64 < columns <= 2048)
