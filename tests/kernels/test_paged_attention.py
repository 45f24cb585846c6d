"""Attention over pages: both backends against a plain float64 oracle; the reference's bits against company."""

from __future__ import annotations

import pytest
import torch
from paged_steps import CASES, TREE, Group, attend, make, oracle

from paceline.kernels import select
from paceline.kernels.eager import plan
from paceline.kernels.reference import attention as reference_attention
from paceline.kernels.trees import ancestry

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])


@BOTH
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("window", [None, 1, 10])
def test_attention_equals_the_oracle(case, kernels, window):
    groups = CASES[case]
    step = make(groups, window=window)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(groups, step), atol=1e-5, rtol=0)


@BOTH
@pytest.mark.parametrize("case", sorted(CASES))
def test_capped_scores_equal_the_oracle(case, kernels):
    for window in (None, 10):
        step = make(CASES[case], window=window)
        got = attend(kernels, step, softcap=0.7).double()
        torch.testing.assert_close(got, oracle(CASES[case], step, softcap=0.7), atol=1e-5, rtol=0)
        assert not torch.allclose(got, oracle(CASES[case], step), atol=1e-3) or case == "one token"


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


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_the_reference_is_bitwise_the_same_in_any_company_and_place(softcap):
    for window in (None, 10):
        everything = CASES["everything"]
        together = attend(REFERENCE, make(everything, window=window), softcap)
        offset = 0
        for index, group in enumerate(everything):
            alone = attend(REFERENCE, make([group], window=window, place=index, block_size=16), softcap)
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
