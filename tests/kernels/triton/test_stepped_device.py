"""Two implementations of DeviceKernels, Triton's and the one in plain torch: the same tensors come of the same ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.device import columns
from paceline.kernels.device.lookup import ALWAYS, Lookup
from paceline.kernels.device.operands import PackedDrafts, Verdicts
from paceline.kernels.device.repeats import Drafts, RepeatInputs, RepeatRows
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.operands import Heads
from paceline.kernels.stepped import SteppedKernels
from paceline.kernels.triton import load
from paceline.speculation.drafter import Budget
from paceline.speculation.drafters.ngram import NgramDrafter, confidence

SEATS, VOCAB, GROUPS, LONGEST = 6, 40, 8, 40


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def tables(device: torch.device) -> SeatTables:
    """Every other seat is penalised."""
    made = SeatTables(SEATS, VOCAB, device, longest=LONGEST)
    made.prepare()
    made.table[::2, columns.FLAGS] = columns.PENALISED
    made.texts.random_(0, VOCAB)
    made.lengths.copy_(torch.tensor([18, 31, 9, LONGEST, 1, 5]))
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
        return [values(part) for part in (thing.table, thing.texts, thing.lengths, thing.counts)]
    if isinstance(thing, DeviceRows):
        return [values(part) for part in (thing.data, thing.group, thing.positions, thing.prefix, thing.tiles)]
    if isinstance(thing, RepeatInputs | Drafts | RepeatRows):
        return [values(getattr(thing, name)) for name in thing.__dataclass_fields__]
    return thing.tolist() if isinstance(thing, torch.Tensor) else thing


def some_inputs(depth: int = 9) -> RepeatInputs:
    """Five groups, one of which is at its end, and three of padding; it is the step's third time. Up to `depth` tokens
    are drafted where more than one matches."""
    inputs = RepeatInputs.over(torch.zeros(RepeatInputs.size(GROUPS), dtype=torch.int64))
    inputs.seats.copy_(torch.tensor([4, 0, 5, 2, 1, -1, -1, -1]))
    inputs.ends.copy_(torch.tensor([20, 20, 4, 10, 60, 9, 0, 0]))
    inputs.levels[1, 0], inputs.levels[2:, :depth] = 3, torch.arange(2, 2 + depth).flip(0)
    inputs.levels[3:6, :depth] = 9
    inputs.time[0] = 2
    return inputs


def some_blocks() -> torch.Tensor:
    return torch.randint(0, 50, (GROUPS, 8), dtype=torch.int32)


def untouched(shape: RowsShape) -> DeviceRows:
    return DeviceRows.over(shape, torch.full((shape.size,), 77, dtype=torch.int32))


def test_begin(device: torch.device) -> None:
    both(device, lambda kernels, own: kernels.begin(*own, 8),
         [some_inputs(), tables(device), some_blocks(), untouched(RowsShape.bucket(GROUPS, 1, 0)),
          RepeatRows.of(GROUPS, GROUPS, device)])


@pytest.mark.parametrize("count", [False, True])
def test_end(device: torch.device, count: bool) -> None:
    sampled = torch.tensor([1, 2, -1, 3, -2, -1, -1, -1], dtype=torch.int32)
    out = torch.zeros(4, GROUPS + 2, dtype=torch.int32)
    both(device, lambda kernels, own: kernels.end(*own, count=count), [some_inputs(), sampled, out, tables(device)])


def repetitive(device: torch.device) -> SeatTables:
    """Texts of few different tokens, looked up in with n-grams of 1 to 3, or 2 to 4; one seat drafts nothing."""
    made = tables(device)
    made.texts.random_(0, 3)
    made.table[:, columns.LOOKUP] = torch.tensor([Lookup(1, 3).packed(4), Lookup(2, 4).packed(7), 0, 0,
                                                  Lookup(1, 3).packed(9), Lookup(1, 16).packed(9)])
    return made


@pytest.mark.parametrize("rows", [9, 12, 40])
def test_drafts_are_found_and_given_rows(device: torch.device, rows: int) -> None:
    """Whatever the shape of the tiles: that is each implementation's own."""

    def call(kernels: Any, own: list[Any]) -> None:
        inputs, tables, drafts, blocks, out = own
        kernels.propose(inputs, tables, drafts)
        assert int(drafts.found.max()) > 3
        shape = kernels.repeat_shape(rows, GROUPS, 10, Heads(4, 2, 16), torch.float32)
        kernels.spread(inputs, tables, drafts, blocks, untouched(shape), out, 8)
        assert int(out.offsets[-1]) == 4 + int(drafts.taken.sum()) <= rows

    for seed in range(4):
        torch.manual_seed(seed)
        both(device, call, [some_inputs(), repetitive(device), Drafts.of(GROUPS, 9, device), some_blocks(),
                            RepeatRows.of(rows, GROUPS, device)])


def test_the_tiles_of_a_step_with_drafts_hold_its_rows(device: torch.device) -> None:
    kernels = load(True, device).device
    assert kernels is not None
    inputs, drafts, out = some_inputs(), Drafts.of(GROUPS, 9, device), RepeatRows.of(40, GROUPS, device)
    shape = kernels.repeat_shape(40, GROUPS, 10, Heads(32, 2, 16), torch.bfloat16)
    assert shape.tile_rows == 2 and shape.tiles == 5 * GROUPS
    rows = untouched(shape)
    kernels.propose(inputs, repetitive(device), drafts)
    kernels.spread(inputs, repetitive(device), drafts, some_blocks(), rows, out, 8)
    held = [row for first, count in rows.tiles.T.tolist() for row in range(first, first + count)]
    assert held == list(range(int(out.offsets[-1])))
    assert rows.group[:len(held)].tolist() == sorted(rows.group[:len(held)].tolist())
    assert (rows.positions[:len(held)] >= 0).all() and (rows.positions[len(held):] == -1).all()


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), max_n=st.integers(1, 16), min_n=st.integers(1, 4),
       depth=st.integers(1, 9), always=st.booleans())
def test_a_device_finds_the_drafts_of_the_host(device: torch.device, text: list[int], max_n: int, min_n: int,
                                               depth: int, always: bool) -> None:
    min_n = min(min_n, max_n)
    drafter = NgramDrafter(min_n=min_n, max_n=max_n)
    sequence: Any = type("Text", (), {"tokens": text, "prompt_len": len(text), "scope": ""})()
    drafter.begin(sequence)
    (expected,) = drafter.propose([sequence], [Budget(depth, 64)])
    for kernels in (load(True, device).device, SteppedKernels().device):
        assert kernels is not None
        own = SeatTables(1, VOCAB, device, longest=50)
        own.texts[0, :len(text)], own.lengths[0] = torch.tensor(text), len(text)
        own.table[0, columns.LOOKUP] = Lookup(min_n, max_n).packed(depth)
        inputs = RepeatInputs.over(torch.full((RepeatInputs.size(1),), 99))
        inputs.seats[0] = 0
        if always:
            own.table[0, columns.LOOKUP] |= ALWAYS
            inputs.levels.zero_()
        drafts = Drafts.of(1, 9, device)
        kernels.propose(inputs, own, drafts)
        count = int(drafts.found)
        assert drafts.tokens[0, :count].tolist() == ([] if expected is None else expected.tokens)
        if expected is not None and expected.scores is not None:
            assert expected.scores[0] == confidence(int(drafts.matched))


def test_record(device: torch.device) -> None:
    drafts = Drafts.of(GROUPS, 4, device)
    drafts.taken.copy_(torch.arange(GROUPS))
    drafts.matched.copy_(torch.arange(GROUPS) + 20)
    verdicts = Verdicts.over(torch.randint(0, 9, (Verdicts.size(GROUPS, 6),), dtype=torch.int32), GROUPS, 6)
    verdicts.accepted.copy_(torch.tensor([0, 1, -1, 4, 2, -1, -1, -1]))
    out = torch.zeros(4, GROUPS + 1, 12, dtype=torch.int32)
    both(device, lambda kernels, own: kernels.record(own[0], own[1], drafts, verdicts, own[2]),
         [some_inputs(), tables(device), out])


def test_fill(device: torch.device) -> None:
    both(device, lambda kernels, own: kernels.fill(*own),
         [torch.tensor([5, -1, 3, -1]), torch.tensor([0, 4, 1, 2]), tables(device)])


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


@pytest.mark.parametrize(("rows", "taken"), [(4, [0, 0, 0]), (5, [1, 0, 0]), (6, [1, 1, 0]), (8, [3, 1, 0]),
                                             (9, [3, 2, 0]), (10, [4, 2, 0]), (14, [4, 3, 3])])
def test_rows_go_to_the_likeliest_tokens(device: torch.device, rows: int, taken: list[int]) -> None:
    """Three drafts of 4, 3 and 3 tokens; a fourth group has none. Where those of the highest level are too many, all
    are cut alike."""
    for kernels in (load(True, device).device, SteppedKernels().device):
        assert kernels is not None
        own = SeatTables(4, VOCAB, device, longest=50)
        own.lengths.fill_(5)
        inputs = RepeatInputs.over(torch.zeros(RepeatInputs.size(4), dtype=torch.int64))
        inputs.seats.copy_(torch.arange(4))
        inputs.ends.fill_(40)
        drafts = Drafts.of(4, 4, device)
        drafts.found.copy_(torch.tensor([4, 3, 3, 0]))
        drafts.levels.copy_(torch.tensor([[15, 12, 12, 5], [14, 9, 3, 15], [2, 1, 1, 15], [15, 15, 15, 15]]))
        out = RepeatRows.of(rows, 4, device)
        shape = kernels.repeat_shape(rows, 4, 5, Heads(4, 2, 16), torch.float32)
        kernels.spread(inputs, own, drafts, torch.zeros(4, 8, dtype=torch.int32), untouched(shape), out, 8)
        assert drafts.taken.tolist() == [*taken, 0]
