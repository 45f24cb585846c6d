"""Adapters on the Triton kernels: fused products with additions, beside rows that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.kernels.adapted import adapted
from paceline.kernels.interface import Kernels
from paceline.kernels.low_rank import NOBODY, AdapterSlots, LowRank, LowRankSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.triton import launch, load, low_rank

HIDDEN, HEADS, DIM = 32, Heads(2, 1, 16), 16
OWNERS = [NOBODY, 0, 1]


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
        self.slots = AdapterSlots()
        assert [self.slots.load(own) for own in self.adapters] == [0, 1]

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
        slots = torch.tensor([OWNERS[row] for row in rows], device=self.device)
        return self.run(adapted(kernels, self.slots, slots), rows)


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


def test_gated_is_its_product_and_the_gate_after_it(exact: Any, device: torch.device) -> None:
    """What rows beside others with an adapter get instead of the fused product. Long rows of few outputs, whose plain
    product is summed in pieces."""
    luck = torch.Generator().manual_seed(5)
    for rows in (1, 20):
        x, weight = (torch.randn(shape, generator=luck).to(device) for shape in ((rows, 1056), (32, 1056)))
        assert torch.equal(exact.gated(x, None, weight, None), exact.gate(exact.gate_up(x, weight), "silu"))


def whole(luck: torch.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, mostly 0: their sums are exact in any order."""
    return (torch.randint(-2, 3, shape, generator=luck) * (torch.rand(shape, generator=luck) < 0.2)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 48), (19, 640), (70, 640)])
def test_additions_have_the_bits_of_torch(exact: Any, device: torch.device, dtype: torch.dtype, rows: int,
                                          inputs: int) -> None:
    """Slots of several ranks, one of which adds nothing to this weight; one piece and two, side by side and in one
    program; an output that is float32, as a head's."""
    luck, size = torch.Generator().manual_seed(rows), 72
    slots = LowRankSlots.like(LowRank(torch.empty(1, inputs, dtype=dtype, device=device),
                                      torch.empty(size, 1, dtype=dtype, device=device)), 4, 48)
    slots.down.fill_(float("nan"))
    slots.up.fill_(float("nan"))  # what does not count is not read
    for slot, rank in ((0, 16), (2, 48), (3, 32)):
        slots.set(slot, LowRank(whole(luck, rank, inputs).to(device, dtype), whole(luck, size, rank).to(device, dtype)))
    x = whole(luck, rows, inputs).to(device, dtype)
    named = torch.randint(-1, 4, (rows,), generator=luck)
    named[0] = 2
    for kind in (dtype, torch.float32):
        out = whole(luck, rows, size).to(device, kind)
        want = ReferenceKernels().add_low_rank(out.cpu().clone(), x.cpu(), _on_host(slots), RowSlots(named))
        got = exact.add_low_rank(out.clone(), x, slots, RowSlots(named.to(device)))
        assert torch.equal(got.cpu(), want) and not torch.equal(got, out)


def _on_host(slots: LowRankSlots) -> LowRankSlots:
    return LowRankSlots(slots.down.cpu(), slots.up.cpu(), slots.ranks.cpu(), slots.host_ranks)


def test_pieces_side_by_side_have_the_bits_of_one_program(device: torch.device,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    luck = torch.Generator().manual_seed(11)
    slots = LowRankSlots.like(LowRank(torch.empty(1, 1100, device=device), torch.empty(40, 1, device=device)), 2, 16)
    slots.set(1, LowRank(*(torch.randn(shape, generator=luck).to(device) for shape in ((16, 1100), (40, 16)))))
    x, out = torch.randn(3, 1100, generator=luck).to(device), torch.randn(3, 40, generator=luck).to(device)
    named = torch.tensor([1, NOBODY, 1], device=device)
    apart = low_rank.add(out.clone(), x, slots, named)
    monkeypatch.setattr(low_rank, "APART_ROWS", 0)
    assert torch.equal(low_rank.add(out.clone(), x, slots, named), apart)
    assert torch.equal(apart[1], out[1]) and not torch.equal(apart[0], out[0])


@pytest.mark.parametrize("columns", [16, 32, 48, 64, 65, 576, 2048, 4096])
def test_what_is_fetched_ahead_is_whole_lines(columns: int) -> None:
    """The factors of an adapter have rows shorter than a line of the cache, and no kernel can fetch a part of one."""
    fetched = launch.fetched(torch.empty(4, columns, dtype=torch.bfloat16))
    assert fetched % launch.LINE == 0
    assert (fetched >= columns) == (64 < columns <= 2048)
