"""Latent caches: one plane, keys that all heads share, values that are their beginning; and a matrix for each head."""

from __future__ import annotations

import pytest
import torch
from paged_steps import CASES, LATENT, attend, latent_step, oracle

from paceline.kernels import select

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])


@BOTH
@pytest.mark.parametrize("case", sorted(CASES))
def test_values_may_be_the_beginning_of_keys(case, kernels):
    groups = CASES[case]
    for window in (None, 10):
        step = latent_step(groups, window=window)
        got = attend(kernels, step)
        assert got.shape == (*step.q.shape[:2], LATENT)
        torch.testing.assert_close(got.double(), oracle(groups, step), atol=1e-5, rtol=0)


def test_latent_attention_has_the_same_bits_in_any_company_and_place():
    everything = CASES["everything"]
    together = attend(REFERENCE, latent_step(everything))
    for index, (group, offset) in enumerate(zip(everything, latent_step(everything).layout.offsets)):
        alone = attend(REFERENCE, latent_step([group], place=index, block_size=16))
        assert torch.equal(alone, together[offset:offset + group.rows])


@BOTH
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_each_head_goes_through_its_own_matrix(kernels, rows):
    x, weight = torch.randn(rows, 5, 24), torch.randn(5, 40, 24)
    expected = torch.einsum("nhk,hmk->nhm", x.double(), weight.double())
    torch.testing.assert_close(kernels.linear_by_head(x, weight).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company_and_at_any_number_of_threads(threads):
    x, weight = torch.randn(40, 6, 96), torch.randn(6, 64, 96)
    torch.set_num_threads(1)
    alone = torch.cat([REFERENCE.linear_by_head(row[None], weight) for row in x])
    torch.set_num_threads(threads)
    try:
        assert torch.equal(REFERENCE.linear_by_head(x, weight), alone)
        assert torch.equal(REFERENCE.linear_by_head(x[7:20], weight), alone[7:20])
    finally:
        torch.set_num_threads(1)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_store_keys_writes_its_slots_and_no_other(kernels, dtype):
    cache, k = torch.zeros(10, 1, 12, dtype=dtype), torch.randn(3, 1, 12)
    slots = torch.tensor([7, 2, 5])
    kernels.store_keys(cache, slots, k)
    assert torch.equal(cache[slots], k.to(dtype)) and not cache[[0, 1, 3, 4, 6, 8, 9]].any()
