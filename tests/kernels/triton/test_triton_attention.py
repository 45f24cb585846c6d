"""Attention in Triton: the oracle's values for every kind of step, and in deterministic mode bits without company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_steps import TREE, Group, Step, make, oracle

from paceline.kernels import select
from paceline.kernels.device.packing import device_rows, pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import Heads
from paceline.kernels.reference.quantised import quantised
from paceline.kernels.trees import ancestry
from paceline.kernels.triton import attention
from paceline.kernels.triton.plan import make_plan, room_for
from pairwise import pairwise

STEPS = {
    "one token": [Group(0, 1)],
    "decodes": [Group(start, 1, seed=start) for start in (37, 0, 64, 300)],
    "a verify pass": [Group(61, 5), Group(7, 5)],
    "trees": [Group(13, len(TREE), TREE), Group(62, 5, [-1, 0, 1, 1, 0], 1)],
    "a tree at the start": [Group(0, len(TREE), TREE)],
    "everything": [Group(13, 9, TREE), Group(0, 20), Group(50, 1), Group(126, 5, [-1, 0, 0, 1, 1], 3), Group(260, 2)],
}
PROMPT = [Group(3, 130), Group(5, 1)]


def on(step: Step, device: torch.device, dtype: torch.dtype = torch.float32, index=torch.int64) -> Step:
    step.q, step.keys, step.values = (x.to(device, dtype) for x in (step.q, step.keys, step.values))
    step.layout.positions = step.layout.positions.to(device)
    view = step.layout.views[0]
    view.tables, view.slots = view.tables.to(device, index), view.slots.to(device, index)
    return step


def attend(kernels, step: Step, scales=None, softcap: float = 0.0) -> torch.Tensor:
    return kernels.attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25, scales, softcap)


@pairwise(indirect=["kernels"], case=sorted(STEPS), window=[None, 10], kernels={"fast": False, "deterministic": True})
def test_attention_equals_the_oracle(kernels, device, case, window):
    step = make(STEPS[case], window=window)
    expected = oracle(STEPS[case], step)
    got = attend(kernels, on(step, device, index=torch.int32 if window else torch.int64))
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["trees", pytest.param("everything", marks=pytest.mark.full), "a prompt"])
def test_capped_scores_equal_the_oracle(kernels, device, case):
    groups = PROMPT if case == "a prompt" else STEPS[case]
    step = make(groups, window=10)
    expected = oracle(groups, step, softcap=0.7)
    got = attend(kernels, on(step, device), softcap=0.7)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
def test_rows_of_a_block_see_each_other(kernels, device, window):
    groups = [Group(61, 7), Group(0, 7, seed=1), Group(300, 4, seed=2), Group(5, 1), Group(2, 140)]
    step = make(groups, window=window, mutual=True)
    expected = oracle(groups, step)
    got = attend(kernels, on(step, device))
    assert not step.layout.device.shape.chunks
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("case", ["decodes", "trees", "a prompt"])
def test_positions_below_the_first_are_seen_by_no_row(kernels, device, case, window):
    groups = {"decodes": [Group(1, 1), Group(300, 1)], "trees": [Group(13, len(TREE), TREE), Group(1, 3)],
              "a prompt": PROMPT}[case]
    step = make(groups, window=window, first=1)
    expected = oracle(groups, step)
    torch.testing.assert_close(attend(kernels, on(step, device)).cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_in_chunks(kernels, device, window):
    step = make(PROMPT, window=window)
    expected = oracle(PROMPT, step)
    got = attend(kernels, on(step, device))
    assert step.layout.device.shape.chunks > 0
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 4, 16, 16), (8, 1, 32, 1), (9, 3, 24, 32),
                                                                      (8, 2, 64, 8)])
def test_head_layouts_and_block_sizes(kernels, device, heads, kv_heads, dim, block_size):
    groups = [Group(13, 5, TREE[:5]), Group(0, 9), Group(70, 1)]
    step = make(groups, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    expected = oracle(groups, step)
    torch.testing.assert_close(attend(kernels, on(step, device)).cpu().double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision(kernels, device, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 matrices as integers")
    groups = [*STEPS["everything"], *PROMPT]
    step = make(groups, heads=8, kv_heads=2, dim=32)
    expected = oracle(groups, step)
    got = attend(kernels, on(step, device, dtype))
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-2 if dtype == torch.float16 else 5e-2, rtol=0)


def coded(step: Step, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Step, tuple[torch.Tensor, torch.Tensor]]:
    """Its caches rounded to 8 bits, and their scales: NaN where nothing is held."""
    codes, scales = [], []
    for cache in (step.keys, step.values):
        plane = torch.zeros(cache.shape[:2], device=cache.device)
        code, _ = quantised(cache.nan_to_num(), cache.nan_to_num(), dtype,
                            torch.arange(len(cache), device=cache.device), (plane, torch.zeros_like(plane)))
        plane[cache.isnan().any(-1)] = torch.nan
        codes.append(code)
        scales.append(plane)
    step.keys, step.values = codes
    return step, (scales[0], scales[1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_caches_of_8_bits(kernels, device, dtype):
    """What counts is what the codes and scales say, not what they were made from."""
    step, scales = coded(on(make(STEPS["everything"]), device), dtype)
    got = attend(kernels, step, scales)
    scales = scales[0].nan_to_num(), scales[1].nan_to_num()
    expected = select(True, device).attend(step.q, step.keys, step.values, step.layout, GroupView(
        step.layout.views[0].tables, step.layout.views[0].slots), 0.25, scales)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_have_the_same_bits_in_any_company(exact, device, dtype):
    """Alone, with others, and in a step that was captured with room for more and longer ones."""
    groups = [Group(13, 5, TREE[:5]), Group(0, 20), Group(260, 2), Group(3, 130)]
    together = attend(exact, *coded(on(make(groups), device, dtype)))
    roomy, scales = coded(on(make(groups), device, dtype))
    view, shape = roomy.layout.views[0], exact.device.verify_shape(256, 8, 8, Heads(6, 2, 16), dtype)
    view.tables = torch.nn.functional.pad(view.tables, (0, 30, 0, 4), value=1)
    roomy.layout.device = device_rows(roomy.layout, shape, device)
    roomy.q = torch.nn.functional.pad(roomy.q, (0, 0, 0, 0, 0, 256 - len(roomy.q)), value=torch.nan)
    assert torch.equal(attend(exact, roomy, scales)[:len(together)], together)
    offset = 0
    for index, group in enumerate(groups):
        alone = attend(exact, *coded(on(make([group], place=index, block_size=16), device, dtype)))
        assert torch.equal(alone, together[offset:offset + group.rows])
        offset += group.rows


def test_buffers_larger_than_the_step(kernels, device):
    """As a captured graph has them: padding rows and tiles, long tables, whatever lay there before."""
    groups = [Group(37, 1), Group(300, 1), Group(13, 5, TREE[:5])]
    step = make(groups)
    expected = oracle(groups, step)
    step = on(step, device)
    view = step.layout.views[0]
    pad = torch.full((9 - len(step.q),), -1, device=device)
    view.slots = torch.cat((view.slots, pad))
    view.tables = torch.nn.functional.pad(view.tables, (0, 30, 0, 4), value=1)
    rows = len(step.q)
    step.q = torch.cat((step.q, torch.full((9 - rows, *step.q.shape[1:]), torch.nan, device=device)))
    shape = RowsShape.bucket(9, 2, 4)
    step.layout.device = DeviceRows.over(shape, torch.full((shape.size,), 77, dtype=torch.int32, device=device))
    for _ in range(2):
        step.layout.device.data.copy_(torch.from_numpy(pack(step.layout, shape)))
        view.scratch.clear()
        got = attend(kernels, step)[:rows]
        torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=0)


def test_a_row_has_the_same_bits_in_any_company_and_place(exact, device):
    for window, groups in ((None, [*STEPS["everything"], Group(3, 130)]), (10, STEPS["everything"])):
        together = attend(exact, on(make(groups, window=window), device))
        offset = 0
        for index, group in enumerate(groups):
            alone = attend(exact, on(make([group], window=window, place=index, block_size=16), device))
            assert torch.equal(alone, together[offset:offset + group.rows])
            offset += group.rows


def test_a_tree_row_has_the_bits_of_its_chain(exact, device):
    """The keys of its ancestors lie elsewhere; the row cannot tell."""
    tree = TREE[:6]
    step = make([Group(61, len(tree), tree)])
    (prefix_k, prefix_v), (own_k, own_v) = step.prefixes[0], step.own[0]
    got = attend(exact, on(step, device)).cpu()
    for row, path in enumerate(ancestry(tree)):
        chain = make([Group(61, len(path))])
        view = chain.layout.views[0]
        physical = torch.arange(61)
        committed = view.tables[0, physical // 4] * 4 + physical % 4
        chain.keys[committed], chain.values[committed] = prefix_k, prefix_v
        chain.keys[view.slots], chain.values[view.slots] = own_k[path], own_v[path]
        chain.q[-1] = step.q[row].cpu()
        assert torch.equal(attend(exact, on(chain, device)).cpu()[-1], got[row])


def test_a_prompt_has_the_same_bits_in_any_chunking(exact, device):
    """In one chunk, in verify passes, row by row: the last rows of a prompt."""
    whole = attend(exact, on(make([Group(0, 262)], heads=2, kv_heads=1), device))
    for rows in (1, 7, 131):
        part = make([Group(0, 262)], heads=2, kv_heads=1)
        layout, view = part.layout, part.layout.views[0]
        layout = replace(layout, positions=layout.positions[-rows:], offsets=[0, rows], starts=[262 - rows],
                         views=[GroupView(view.tables, view.slots[-rows:])])
        part.layout, part.q = layout, part.q[-rows:]
        assert torch.equal(attend(exact, on(part, device)), whole[-rows:])


@pytest.mark.parametrize("dim", [16, 72])
@pytest.mark.parametrize("rows", [14, 27, 40])
def test_tiles_of_every_height(device, dim, rows):
    """The heights of 16-bit models, here in float32: few rows make low tiles."""
    groups = [Group(37, rows - 9), Group(5, 8, [-1, 0, 0, 1, 1, 2, 4, 4]), Group(70, 1)]
    step = on(make(groups, heads=6, kv_heads=2, dim=dim, window=30), device)
    chosen = attention.tuning(torch.float16, dim, False, 4)
    got = attention.attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25, None, chosen, False,
                           torch.zeros(1 << 10, dtype=torch.int32, device=device))
    high = {(16, 14): 16, (16, 27): 16, (16, 40): 32, (72, 14): 16, (72, 27): 32, (72, 40): 64}[dim, rows]
    assert step.layout.device.shape.tile_rows == min(rows - 9, high // 3)
    torch.testing.assert_close(got.cpu().double(), oracle(groups, step), atol=2e-5, rtol=0)


def test_scratch_is_for_rows_in_tiles_alone(exact):
    """Rows of prompts are cut into chunks, which keep nothing: 8,192 of them cost no more than 256 seats do."""
    shape = exact.device.prefill_shape(8192, 256, Heads(32, 8, 128), torch.bfloat16)
    assert room_for(shape, 131_072, 8, 256, True, 264) == (256 * 512, 256 * 512)
    assert exact.device.scratch(shape, 131_072, Heads(32, 8, 128), torch.bfloat16) == 256 * 512 * 32 * 130 * 4


def test_a_plan_for_more_keys_than_32_bits_count(device):
    """256 requests behind a prefix of 262,144 tokens that they share, 32 KV heads."""
    layout = Layout(torch.zeros(256, dtype=torch.int64), list(range(257)), [262_143] * 256, [None] * 256, 16, [])
    rows = device_rows(layout, RowsShape.bucket(256, 1, 0), device)
    plan = make_plan(rows, window=None, longest=262_144, heads=32, kv_heads=32, dim=16, split=128, fixed=False,
                     target=528, block_n=64)
    assert 256 <= int(plan.total) <= plan.items.shape[0]


def test_too_many_tiles_are_refused(exact, device):
    step = on(make(STEPS["decodes"]), device)
    exact._arrived = exact._arrived[:7]
    with pytest.raises(ValueError, match="4 tiles of 2 heads do not fit into 7 counters"):
        attend(exact, step)
