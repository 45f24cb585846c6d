"""Attention over pages: both backends against a plain float64 oracle; the reference's bits against company."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from paceline.kernels import select
from paceline.kernels.eager import plan
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.paths import ancestry, depths
from paceline.kernels.reference import attention as reference_attention

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])
TREE = [-1, 0, 0, 1, 1, 2, 4, 4, 0]


@dataclass
class Group:
    """Rows of one sequence with their own random queries, keys and values, whoever else is in the step."""

    start: int
    rows: int
    parents: list[int] | None = None
    seed: int = 0


@dataclass
class Step:
    layout: Layout
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    prefixes: list[tuple[torch.Tensor, torch.Tensor]]
    own: list[tuple[torch.Tensor, torch.Tensor]]


def make(groups: list[Group], *, heads: int = 6, kv_heads: int = 2, dim: int = 16, block_size: int = 4,
         window: int | None = None, place: int = 0) -> Step:
    """Caches full of NaN but for what the groups own; tables shuffled by `place`."""
    rng = random.Random(place)
    needed = [-(-(group.start + group.rows) // block_size) for group in groups]
    free = list(range(1, sum(needed) + 9))
    rng.shuffle(free)
    total = (sum(needed) + 9) * block_size
    keys, values = (torch.full((total, kv_heads, dim), torch.nan) for _ in range(2))
    keys[:block_size] = values[:block_size] = 0
    tables = torch.zeros(len(groups), max(needed) + 1, dtype=torch.int64)
    offsets, positions, slots, queries, prefixes, own = [0], [], [], [], [], []
    for index, group in enumerate(groups):
        tables[index, :needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        source = torch.Generator().manual_seed(group.seed * 7919 + group.start)
        k, v = (torch.randn(group.start + group.rows, kv_heads, dim, generator=source) for _ in range(2))
        queries.append(torch.randn(group.start + group.rows, heads, dim, generator=source)[group.start:])
        physical = torch.arange(group.start + group.rows)
        where = tables[index, physical // block_size] * block_size + physical % block_size
        keys[where], values[where] = k, v
        if window is not None:  # blocks every row has passed were given away
            for block in range(max(0, group.start - window + 1) // block_size):
                gone = int(tables[index, block])
                keys[gone * block_size:(gone + 1) * block_size] = torch.nan
                tables[index, block] = 0
        slots.append(where[group.start:])
        offsets.append(offsets[-1] + group.rows)
        depth = range(group.rows) if group.parents is None else depths(group.parents)
        positions += [group.start + d for d in depth]
        prefixes.append((k[:group.start], v[:group.start]))
        own.append((k[group.start:], v[group.start:]))
    view = GroupView(tables, torch.cat(slots), window)
    layout = Layout(torch.tensor(positions), offsets, [group.start for group in groups],
                    [group.parents for group in groups], block_size, [view])
    return Step(layout, torch.cat(queries), keys, values, prefixes, own)


def attend(kernels: Kernels, step: Step) -> torch.Tensor:
    return kernels.attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25)


def oracle(groups: list[Group], step: Step) -> torch.Tensor:
    window, out = step.layout.views[0].window, []
    for group, (pk, pv), (ok, ov), begin in zip(groups, step.prefixes, step.own, step.layout.offsets):
        paths = ancestry(group.parents if group.parents is not None else list(range(-1, group.rows - 1)))
        for row, path in enumerate(paths):
            k, v = (torch.cat((prefix, mine[path])).double() for prefix, mine in ((pk, ok), (pv, ov)))
            if window is not None:
                k, v = k[-window:], v[-window:]
            shared = step.q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            weights = torch.softmax(torch.einsum("hd,shd->hs", step.q[begin + row].double(), k) * 0.25, -1)
            out.append(torch.einsum("hs,shd->hd", weights, v))
    return torch.stack(out)


CASES = {
    "one token": [Group(0, 1)],
    "one decode": [Group(37, 1)],
    "a prompt": [Group(0, 70)],
    "a later chunk": [Group(45, 30)],
    "decodes": [Group(start, 1, seed=start) for start in (0, 3, 64, 65, 127, 128, 9)],
    "decodes of very different lengths": [Group(start, 1, seed=start) for start in (3000, 4, 5, 1, 40, 2900, 700)],
    "a tree": [Group(13, len(TREE), TREE)],
    "a tree at the start": [Group(0, len(TREE), TREE)],
    "trees of one size": [Group(13, len(TREE), TREE), Group(62, len(TREE), [-1, 0, 1, 1, 1, 1, 5, 6, 7], 1)],
    "verify passes": [Group(start, 5, seed=start) for start in (20, 7, 61)],
    "everything": [Group(13, 9, TREE), Group(0, 20), Group(50, 1), Group(7, 9), Group(70, 1), Group(33, 20, None, 4),
                   Group(126, 9, TREE, 3), Group(0, 1)],
    "a long prompt in pieces": [Group(10, 270), Group(5, 1)],
}


@BOTH
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("window", [None, 1, 10])
def test_attention_equals_the_oracle(case, kernels, window):
    groups = CASES[case]
    step = make(groups, window=window)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(groups, step), atol=1e-5, rtol=0)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 4, 8, 16), (8, 1, 32, 1), (9, 3, 64, 32)])
def test_head_layouts_and_block_sizes(kernels, heads, kv_heads, dim, block_size):
    groups = CASES["everything"]
    step = make(groups, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(groups, step), atol=1e-5, rtol=0)


@BOTH
def test_blocks_side_by_side_are_read_in_place_and_give_the_same(kernels):
    groups = [Group(37, 3)]
    step = make(groups)
    tables = step.layout.views[0].tables
    order = torch.arange(1, 11)
    slots = (tables[0, :10, None] * 4 + torch.arange(4)).flatten()
    keys, values = step.keys.clone(), step.values.clone()
    keys[4:44], values[4:44] = step.keys[slots], step.values[slots]
    expected = attend(kernels, step)
    tables[0, :10] = order
    # The caches may be parts of one buffer.
    step.keys, step.values = torch.stack((keys, values)).unbind(0)
    step.layout.views[0].scratch.clear()
    torch.testing.assert_close(attend(kernels, step), expected, atol=1e-6, rtol=0)


def test_the_reference_is_bitwise_the_same_in_any_company_and_place():
    for window in (None, 10):
        everything = CASES["everything"]
        together = attend(REFERENCE, make(everything, window=window))
        offset = 0
        for index, group in enumerate(everything):
            alone = attend(REFERENCE, make([group], window=window, place=index, block_size=16))
            assert torch.equal(alone, together[offset:offset + group.rows])
            offset += group.rows


def test_the_reference_is_bitwise_the_same_at_any_number_of_threads():
    before = torch.get_num_threads()
    step = make([Group(200, 40), Group(90, 1)], heads=9, kv_heads=3, dim=64)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(attend(REFERENCE, step))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_tree_row_has_the_bits_of_its_chain():
    """The keys of its ancestors lie elsewhere; the row cannot tell."""
    step = make([Group(61, len(TREE), TREE)])
    got = attend(REFERENCE, step)
    (prefix_k, prefix_v), (own_k, own_v) = step.prefixes[0], step.own[0]
    for row, path in enumerate(ancestry(TREE)):
        chain = make([Group(61, len(path))])
        view = chain.layout.views[0]
        physical = torch.arange(61)
        committed = view.tables[0, physical // 4] * 4 + physical % 4
        chain.keys[committed], chain.values[committed] = prefix_k, prefix_v
        chain.keys[view.slots], chain.values[view.slots] = own_k[path], own_v[path]
        chain.q[-1] = step.q[row]
        assert torch.equal(attend(REFERENCE, chain)[-1], got[row])


def test_memory_stays_bounded_without_changing_a_bit(monkeypatch):
    """Small limits force row chunks and plans that are not kept: same bits."""
    step = make(CASES["everything"])
    expected = {kernels.name: attend(kernels, step) for kernels in (REFERENCE, EAGER)}
    assert "reference.tiles" in step.layout.views[0].scratch and "eager.calls" in step.layout.views[0].scratch
    step.layout.views[0].scratch.clear()
    monkeypatch.setattr(reference_attention, "CHUNK_BYTES", 3 * 64 * 4 * 2 * 16)
    monkeypatch.setattr(reference_attention, "KEPT_ENTRIES", 0)
    monkeypatch.setattr(plan, "KEPT_ENTRIES", 0)
    for kernels in (REFERENCE, EAGER):
        assert torch.equal(attend(kernels, step), expected[kernels.name])
    assert not step.layout.views[0].scratch


def test_eager_splits_calls_by_context_length():
    """One long context must not make thirty short ones as expensive as itself."""
    step = make(CASES["decodes of very different lengths"])
    calls = list(plan.plan(step.layout, step.layout.views[0], torch.float32))
    gathered = sum(call.blocks.numel() for call in calls) * 4
    assert 1 < len(calls) < 7
    assert gathered < 3 * sum(group.start + 1 for group in CASES["decodes of very different lengths"])
