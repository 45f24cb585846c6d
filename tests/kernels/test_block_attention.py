"""What trained draft heads ask of attention: rows of a block that see each other, and texts whose first token has no
entry. Every backend on a CPU against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from paged_steps import TREE, Group, attend, latent_step, make, oracle

from paceline.kernels import cpu, select
from paceline.kernels.device.packing import pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.stepped import SteppedKernels

CPU = torch.device("cpu")
BACKENDS = {"reference": select(True, CPU), "eager": select(False, CPU), "stepped": SteppedKernels()}
if cpu.load() is not None:
    from paceline.kernels.cpu.backend import NativeKernels

    BACKENDS["native"] = NativeKernels(2)
EACH = pytest.mark.parametrize("kernels", list(BACKENDS.values()), ids=list(BACKENDS))
BLOCKS = {
    "one": [Group(37, 7)],
    "at the start": [Group(0, 7)],
    "of one size": [Group(start, 7, seed=start) for start in (0, 61, 130, 5)],
    "of several sizes": [Group(20, 7), Group(64, 3, seed=1), Group(9, 1, seed=2), Group(300, 7, seed=3)],
    "a large one": [Group(2, 300), Group(40, 5)],
}
CHAINS = {
    "decodes": [Group(1, 1), Group(3, 1, seed=1), Group(64, 1, seed=2), Group(300, 1, seed=3)],
    "one decode": [Group(1, 1)],
    "a chunk": [Group(1, 70)],
    "trees": [Group(13, len(TREE), TREE), Group(1, 4, [-1, 0, 0, 1], 1), Group(7, 9)],
}


@EACH
@pytest.mark.parametrize("case", sorted(BLOCKS))
@pytest.mark.parametrize("window", [None, 10])
def test_rows_of_a_block_see_each_other(kernels, case, window):
    groups = BLOCKS[case]
    step = make(groups, window=window, mutual=True)
    expected = oracle(groups, step)
    torch.testing.assert_close(attend(kernels, step).double(), expected, atol=1e-5, rtol=0)
    if case != "a large one":
        chain = make(groups, window=window)
        assert not torch.allclose(attend(kernels, chain).double(), expected, atol=1e-3)


@EACH
@pytest.mark.parametrize("case", sorted(CHAINS))
@pytest.mark.parametrize("window", [None, 10])
def test_positions_below_the_first_are_seen_by_no_row(kernels, case, window):
    """Their slots hold NaN here."""
    groups = CHAINS[case]
    step = make(groups, window=window, first=1)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(groups, step), atol=1e-5, rtol=0)


@EACH
@pytest.mark.parametrize("case", sorted(CHAINS))
def test_the_same_of_latent_caches(kernels, case):
    step = latent_step(CHAINS[case], first=1)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(CHAINS[case], step), atol=1e-5, rtol=0)


@EACH
def test_a_block_whose_first_token_has_no_entry(kernels):
    groups = BLOCKS["of one size"]
    step = make(groups, mutual=True, first=1)
    torch.testing.assert_close(attend(kernels, step).double(), oracle(groups, step), atol=1e-5, rtol=0)


@EACH
def test_a_row_below_the_first_disturbs_no_other(kernels):
    groups = [Group(0, 1), Group(9, 1, seed=1), Group(0, 5, seed=2)]
    step = make(groups, first=1)
    got, expected = attend(kernels, step).double(), oracle([Group(9, 1, seed=1)], make(groups[1:2], first=1))
    torch.testing.assert_close(got[1:2], expected, atol=1e-5, rtol=0)
    assert got[3:].isfinite().all()


@pytest.mark.parametrize("name", [name for name in BACKENDS if name in ("reference", "native")])
def test_a_block_has_the_same_bits_in_any_company_and_place(name):
    kernels, groups = BACKENDS[name], BLOCKS["of several sizes"]
    step = make(groups, mutual=True)
    together = attend(kernels, step)
    for index, (group, begin) in enumerate(zip(groups, step.layout.offsets)):
        alone = attend(kernels, make([group], mutual=True, place=index, block_size=16))
        assert torch.equal(alone, together[begin:begin + group.rows])


def test_blocks_that_lie_in_device_rows():
    groups, rows = BLOCKS["of several sizes"], 24
    step = make(groups, mutual=True)
    layout, view, count = step.layout, step.layout.views[0], step.layout.rows
    expected = ReferenceKernels().attend(step.q, step.keys, step.values, layout, view, 0.25)
    shape = RowsShape.bucket(rows, 4, 0)
    layout.device = DeviceRows.over(shape, torch.from_numpy(pack(layout, shape)))
    view.slots = torch.cat((view.slots, torch.full((rows - count,), -1)))
    view.scratch.clear()
    q = torch.cat((step.q, torch.full((rows - count, *step.q.shape[1:]), torch.nan)))
    found = SteppedKernels().attend(q, step.keys, step.values, layout, view, 0.25)
    assert torch.equal(found[:count], expected)


@EACH
@pytest.mark.parametrize("normed", [True, False])
def test_rows_that_only_store(kernels, normed):
    """Heads without queries: keys normed and rotated, values as they are, in their slots, as beside queries."""
    source = torch.Generator().manual_seed(1)
    qkv, cos, sin = (torch.randn(shape, generator=source) for shape in ((5, (4 + 2 * 2) * 16), (5, 1, 16), (5, 1, 16)))
    norm = Norm(torch.rand(16, generator=source) + 0.5, 1e-5) if normed else None
    slots, caches = torch.tensor([3, 9, 1, 7, 4]), []
    for heads, given in ((Heads(4, 2, 16, norm, norm), qkv), (Heads(0, 2, 16, norm, norm), qkv[:, 64:])):
        cache = KVCache(torch.zeros(12, 2, 16), torch.zeros(12, 2, 16))
        found = kernels.rotate_and_store(given.clone(), heads, cos, sin, cache, slots)
        assert found.shape == (5, heads.query, 16)
        caches.append(cache)
    torch.testing.assert_close(caches[0].keys, caches[1].keys)
    torch.testing.assert_close(caches[0].values, caches[1].values)
    assert caches[0].keys[slots].abs().min() > 0
