"""Latent attention and products by head in Triton: the oracle's values for every kind of step, and in deterministic
mode bits without company, whether a step is launched or laid out for a graph."""

from __future__ import annotations

import pytest
import torch
from paged_steps import LATENT, TREE, Group, Step, latent_step, oracle

from paceline.kernels.device.packing import pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads
from paceline.kernels.triton import latent
from pairwise import pairwise

STEPS = {
    "one token": [Group(0, 1)],
    "decodes": [Group(start, 1, seed=start) for start in (37, 0, 300)],
    "trees": [Group(13, len(TREE), TREE), Group(62, 5, [-1, 0, 1, 1, 0], 1)],
    "everything": [Group(13, 9, TREE), Group(0, 20), Group(50, 1), Group(254, 5, [-1, 0, 0, 1, 1], 3), Group(260, 2)],
}


def on(step: Step, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    step.q, step.keys = step.q.to(device, dtype), step.keys.to(device, dtype)
    step.values = step.keys[..., :LATENT]
    step.layout.positions = step.layout.positions.to(device)
    view = step.layout.views[0]
    view.tables, view.slots = view.tables.to(device), view.slots.to(device)
    return step


def attend(kernels, step: Step, softcap: float = 0.0) -> torch.Tensor:
    return kernels.attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25, softcap=softcap)


@pairwise(indirect=["kernels"], case=sorted(STEPS), kernels={"fast": False, "deterministic": True}, window=[None, 10],
          heads=[6, 20])
def test_attention_equals_the_oracle(kernels, device, case, window, heads):
    step = latent_step(STEPS[case], window=window, heads=heads)
    expected = oracle(STEPS[case], step, softcap=0.7 if window else 0.0)
    got = attend(kernels, on(step, device), softcap=0.7 if window else 0.0)
    assert got.shape == (*step.q.shape[:2], LATENT)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
def test_positions_below_the_first_are_seen_by_no_row(kernels, device, window):
    groups = [Group(1, 1), Group(300, 1, seed=1), Group(13, len(TREE), TREE)]
    step = latent_step(groups, window=window, first=1)
    expected = oracle(groups, step)
    torch.testing.assert_close(attend(kernels, on(step, device)).cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision(kernels, device, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 matrices as integers")
    step = on(latent_step(STEPS["trees"]), device, dtype)
    expected = oracle(STEPS["trees"], latent_step(STEPS["trees"]))
    got = attend(kernels, step)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-2 if dtype == torch.float16 else 5e-2, rtol=0)


ROOM = latent.MOST_RESULTS


def room_for(cells: int, rows: int) -> int:
    """MOST_RESULTS that has room for so many spans of each row; 6 heads."""
    return cells * rows * 6 * LATENT * 4


@pytest.mark.parametrize(("processors", "cells", "window"), [
    pytest.param(0, None, None, id="one after the other"), pytest.param(99, 1, 300, id="the last one apart, window"),
    pytest.param(99, None, None, id="side by side"),
    *(pytest.param(processors, cells, window, marks=pytest.mark.full)
      for processors, cells, window in ((0, None, 300), (99, 1, None), (99, None, 300), (99, 0, None)))])
def test_the_same_bits_in_any_company_and_way(exact, device, window, processors, cells, monkeypatch):
    """Alone its spans run side by side; in company they run as there are programs, and room for what they find."""
    groups = STEPS["everything"]
    exact._processors = 99
    alone = [attend(exact, on(latent_step([group], window=window, place=index), device))
             for index, group in enumerate(groups)]
    exact._processors = processors
    step = on(latent_step(groups, window=window), device)
    monkeypatch.setattr(latent, "MOST_RESULTS", ROOM if cells is None else room_for(cells, len(step.q)))
    assert torch.equal(torch.cat(alone), attend(exact, step))


def captured(step: Step, device: torch.device, rows: int, pages: int, depth: int) -> Step:
    """As a captured step has it: room for more rows and far longer texts, whatever lies there; the host's lists say
    nothing."""
    view, own, count = step.layout.views[0], step.layout, len(step.q)
    shape = RowsShape.bucket(rows, 1, depth)
    device_rows = DeviceRows.over(shape, torch.from_numpy(pack(own, shape)).to(device))
    slots = torch.cat((view.slots, torch.full((rows - count,), -1, device=device)))
    tables = torch.nn.functional.pad(view.tables.int(), (0, pages, 0, 4), value=99)
    q = torch.cat((step.q, torch.full((rows - count, *step.q.shape[1:]), torch.nan, device=device)))
    positions = torch.nn.functional.pad(own.positions, (0, rows - count))
    layout = Layout(positions, [0, rows], [0], [None], own.block_size, [GroupView(tables, slots, view.window)],
                    device_rows)
    return Step(layout, q, step.keys, step.values, step.prefixes, step.own)


LONG = [Group(600, 1), Group(509, 5, [-1, 0, 0, 1, 1], 1), Group(255, 3, None, 2), Group(0, 1, None, 3)]


@pytest.mark.parametrize("cells", [None, 2, 1, 0])
def test_a_captured_step_has_the_bits_of_a_launched_one(exact, device, cells, monkeypatch):
    """Where it is captured nobody knows how long texts are: there may be cells for all spans they could have, for some
    of those they have, or for none."""
    exact._processors = 99
    expected = attend(exact, on(latent_step(LONG), device))
    torch.testing.assert_close(expected.cpu().double(), oracle(LONG, latent_step(LONG)), atol=1e-5, rtol=0)
    step = captured(on(latent_step(LONG), device), device, rows=13, pages=300, depth=4)
    monkeypatch.setattr(latent, "MOST_RESULTS", ROOM if cells is None else room_for(cells, 13))
    assert torch.equal(attend(exact, step)[:len(expected)], expected)
    # The next step that the same buffers hold: shorter, and fewer.
    shorter = [Group(37, 1), Group(13, len(TREE), TREE)]
    again = captured(on(latent_step(shorter), device), device, rows=13, pages=300, depth=8)
    assert torch.equal(attend(exact, again)[:10], attend(exact, on(latent_step(shorter), device)))


def test_what_is_launched_follows_from_the_shape_alone(exact, device, monkeypatch):
    """And programs are few where rows are many, or texts cannot be long."""
    grids: list[tuple[int, ...]] = []

    class Watched:
        def __init__(self, kernel):
            self._kernel = kernel

        def __getitem__(self, grid):
            grids.append(grid)
            return self._kernel[grid]

    for name in ("span_kernel", "latent_kernel"):
        monkeypatch.setattr(latent, name, Watched(getattr(latent, name)))

    def launched(groups: list[Group], rows: int, pages: int) -> list[tuple[int, ...]]:
        grids.clear()
        step = on(latent_step(groups), device)
        attend(exact, captured(step, device, rows, pages - step.layout.views[0].tables.shape[1], 0))
        return list(grids)

    exact._processors = 4
    assert launched([Group(0, 1)], 2, 320) == launched([Group(300, 1), Group(7, 1)], 2, 320) == [(2, 1, 5), (2, 1)]
    assert launched([Group(0, 1)], 5, 6400) == [(5, 1, 12), (5, 1)], "16 programs a processor are enough"
    assert launched([Group(0, 1)], 8, 320) == [(8, 1)], "eight rows keep four processors busy"
    assert launched([Group(0, 1)], 1, 64) == [(1, 1)], "texts have one span"


def test_scratch_is_bounded(exact):
    """At DeepSeek-V3's shape, texts of 131,072 tokens."""
    heads, longest = Heads(128, 1, 576, latent=512), 131_072
    exact.device._processors = 132
    taken = {rows: exact.device.scratch(RowsShape.bucket(rows, 1, 0), longest, heads, torch.bfloat16)
             for rows in (1, 2, 8, 64, 131, 132, 8192)}
    assert taken[1] == 512 * 128 * 514 * 4 and taken[132] == taken[8192] == 0
    assert max(taken.values()) < 1.01 * latent.MOST_RESULTS and min(taken[rows] for rows in (2, 8, 64, 131)) > 0


def test_steps_of_any_kind_fit_the_shapes_of_latent_caches(exact):
    """Tiles are few: nobody reads them."""
    heads = Heads(128, 1, 576, latent=512)
    chains = [Group(40, 200), Group(9, 1), Group(0, 5), Group(3, 1)]
    trees = [*chains, Group(13, len(TREE), TREE), Group(62, 5, [-1, 0, 1, 1, 0])]
    for shape, groups in ((exact.device.prefill_shape(256, 8, heads, torch.bfloat16), chains),
                          (exact.device.verify_shape(256, 8, 0, heads, torch.bfloat16), chains),
                          (exact.device.verify_shape(256, 8, 8, heads, torch.bfloat16), trees)):
        packed = DeviceRows.over(shape, torch.from_numpy(pack(latent_step(groups).layout, shape)))
        assert int(packed.tiles[1].sum() + packed.chunks[1].sum()) == sum(group.rows for group in groups)
    assert exact.device.repeat_shape(24, 4, 8, heads, torch.bfloat16).tiles == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_go_to_their_slots_and_padding_nowhere(exact, device, dtype):
    cache, k = torch.zeros(10, 1, 12, dtype=dtype, device=device), torch.randn(4, 1, 12, device=device)
    slots = torch.tensor([7, -1, 2, 5], device=device)
    exact.store_keys(cache, slots, k)
    assert torch.equal(cache[[7, 2, 5]], k[[0, 2, 3]].to(dtype)) and not cache[[0, 1, 3, 4, 6, 8, 9]].any()


@pytest.mark.parametrize("rows", [1, 3, 21])
def test_each_head_goes_through_its_own_matrix(kernels, device, rows):
    whole, weight = torch.randn(rows, 5, 40), torch.randn(5, 40, 24)
    x = whole[..., :24]  # as queries are: part of a wider row
    expected = torch.einsum("nhk,hmk->nhm", x.double(), weight.double())
    got = kernels.linear_by_head(whole.to(device)[..., :24], weight.to(device))
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-4, rtol=0)


def test_a_row_by_head_has_the_same_bits_in_any_company(exact, device):
    x, weight = torch.randn(40, 3, 72, device=device), torch.randn(3, 33, 72, device=device)
    alone = torch.cat([exact.linear_by_head(row[None], weight) for row in x])
    assert torch.equal(alone, exact.linear_by_head(x, weight))
