"""The torch backends on a CUDA device: same results as on the CPU, same promises."""

from __future__ import annotations

import pytest
import torch
from paged_steps import CASES, attend, make, oracle

from paceline.kernels import select

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(step):
    step.q, step.keys, step.values = step.q.cuda(), step.keys.cuda(), step.values.cuda()
    step.layout.positions = step.layout.positions.cuda()
    view = step.layout.views[0]
    view.tables, view.slots = view.tables.cuda(), view.slots.cuda()
    return step


@pytest.mark.parametrize("deterministic", [True, False], ids=["reference", "eager"])
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("window", [None, 10])
def test_attention_equals_the_oracle(case, deterministic, window):
    kernels = select(deterministic, torch.device("cuda"))
    step = make(CASES[case], window=window)
    expected = oracle(CASES[case], step)
    torch.testing.assert_close(attend(kernels, on_gpu(step)).cpu().double(), expected, atol=1e-4, rtol=0)


def test_the_reference_is_bitwise_the_same_in_any_company_and_place():
    kernels = select(True, torch.device("cuda"))
    everything = CASES["everything"]
    together = attend(kernels, on_gpu(make(everything)))
    offset = 0
    for index, group in enumerate(everything):
        alone = attend(kernels, on_gpu(make([group], place=index, block_size=16)))
        assert torch.equal(alone, together[offset:offset + group.rows])
        offset += group.rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_linear_of_a_row_does_not_see_its_neighbours(dtype):
    kernels = select(True, torch.device("cuda"))
    for inputs, outputs in ((576, 960), (1536, 576), (4096, 6144)):
        x, weight = (torch.randn(rows, inputs, device="cuda", dtype=dtype) for rows in (67, outputs))
        whole = kernels.linear(x, weight)
        for first, last in ((0, 1), (5, 30), (60, 67)):
            assert torch.equal(kernels.linear(x[first:last], weight), whole[first:last])
