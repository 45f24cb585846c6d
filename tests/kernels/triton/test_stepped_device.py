"""Two implementations of DeviceKernels, Triton's and the one in plain torch: the same tensors come of the same ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.kernels.device import columns
from paceline.kernels.device.operands import PackedDrafts
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.stepped import SteppedKernels
from paceline.kernels.triton import load

SEATS, VOCAB, ROWS = 6, 40, 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def tables(device: torch.device) -> SeatTables:
    """Every other seat is penalised."""
    made = SeatTables(SEATS, VOCAB, device)
    made.prepare()
    made.table[::2, columns.FLAGS] = columns.PENALISED
    made.last_tokens.random_(0, VOCAB)
    return made


def both(device: torch.device, call: Callable[[Any, list[Any]], Any], given: list[Any]) -> None:
    """`call` with each implementation on copies of `given`: they must leave the same behind, and return the same."""
    left = []
    for kernels in (load(True, device).device, SteppedKernels().device):
        own = copy.deepcopy(given)
        found = call(kernels, own)
        left.append([*map(values, own), values(found)])
    assert left[0] == left[1]


def values(thing: Any) -> Any:
    if isinstance(thing, SeatTables):
        return [values(part) for part in (thing.table, thing.last_tokens, thing.counts)]
    if isinstance(thing, DeviceRows):
        return [values(part) for part in (thing.data, thing.group, thing.positions, thing.prefix, thing.tiles)]
    return thing.tolist() if isinstance(thing, torch.Tensor) else thing


def some_inputs() -> torch.Tensor:
    """Five rows, the second's token pending, and three of padding; it is the step's third repeat."""
    tokens = torch.tensor([7, -1, 0, 3, 9, 5, -1, 0])
    positions = torch.tensor([0, 17, 4, 8, 30, -1, -1, -1])
    seats = torch.tensor([4, 0, 5, 2, 1, 3, 0, 0])
    return torch.cat((tokens, positions, seats, torch.tensor([2])))


def test_begin(device: torch.device) -> None:
    shape = RowsShape.bucket(ROWS, 1, 0)
    rows = DeviceRows.over(shape, torch.full((shape.size,), 77, dtype=torch.int32))
    longs = [torch.full((ROWS,), 77) for _ in range(3)]
    seats, blocks = torch.full((ROWS,), 77, dtype=torch.int32), torch.randint(0, 50, (ROWS, 4), dtype=torch.int32)
    both(device, lambda kernels, own: kernels.begin(*own, 8),
         [some_inputs(), blocks, tables(device).last_tokens, rows, *longs, seats])


@pytest.mark.parametrize("count", [False, True])
def test_end(device: torch.device, count: bool) -> None:
    sampled = torch.tensor([1, 2, -1, 3, -2, -1, -1, -1], dtype=torch.int32)
    out = torch.zeros(4, ROWS + 2, dtype=torch.int32)
    both(device, lambda kernels, own: kernels.end(*own, count=count), [some_inputs(), sampled, out, tables(device)])


def test_fill(device: torch.device) -> None:
    given = [torch.tensor([5, -1, 3, -1]), torch.tensor([0, 4, 1, 2]), tables(device).last_tokens]
    both(device, lambda kernels, own: kernels.fill(*own), given)


@pytest.mark.parametrize("count", [False, True])
def test_note(device: torch.device, count: bool) -> None:
    sampled, seats = (torch.tensor(ids, dtype=torch.int32) for ids in ([3, -1, 9, 4, 8], [0, 2, -1, 5, 4]))
    both(device, lambda kernels, own: kernels.note(*own, count=count), [sampled, seats, tables(device)])


def test_seat(device: torch.device) -> None:
    packed = torch.randint(-(1 << 60), 1 << 60, (3, 2 + columns.COLUMNS))
    packed[:, 0], packed[:, 1] = torch.tensor([4, 0, 3]), torch.tensor([11, 12, 13])
    both(device, lambda kernels, own: kernels.seat(*own), [packed, tables(device)])


def drafts(groups: int) -> tuple[PackedDrafts, torch.Tensor]:
    """Random trees of few tokens, so that drafts are often right; a group without rows and one without a seat last."""
    offsets, parents, seats = [0], [], []
    for group in range(groups):
        size = int(torch.randint(1, 9, ()))
        parents += [-1, *(offsets[-1] + int(torch.randint(0, row, ())) for row in range(1, size))]
        seats += [group % SEATS] * size
        offsets.append(len(parents))
    offsets += [len(parents), len(parents) + 1]
    parents, seats = [*parents, -1], [*seats, -1]
    fed, sampled = torch.randint(0, 2, (len(parents),)), torch.randint(-1, 2, (len(parents),), dtype=torch.int32)
    ints = [torch.tensor(ids, dtype=torch.int32) for ids in (offsets, parents, seats)]
    return PackedDrafts(ints[0], ints[1], fed, ints[2], 8), sampled


@pytest.mark.parametrize("depth", [2, 8])
def test_verify_and_compact(device: torch.device, depth: int) -> None:
    packed, sampled = drafts(12)
    rows = len(sampled)
    planes = [torch.randn(rows + 5, 2, 4), torch.randint(-100, 100, (rows + 5, 8), dtype=torch.int8)]
    slots = torch.randperm(rows + 5)[:rows]

    def call(kernels: Any, own: list[Any]) -> torch.Tensor:
        found = kernels.verifier(14, depth, device).verify(packed, sampled, own[0], count=True)
        assert int(found.accepted.max()) > 1
        kernels.compaction(own[1:]).move(packed.offsets, found.accepted, found.rows, slots)
        return found.packed

    both(device, call, [tables(device), *planes])
