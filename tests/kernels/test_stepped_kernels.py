"""Steps that lie in DeviceRows, padding among them, on the device path's kernels in torch: the reference's bits."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_steps import TREE, Group, make
from paceline.kernels.device.packing import pack
from paceline.kernels.device.rows import DeviceRows, RowsShape
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.stepped import SteppedKernels

ROWS = 24


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("groups", [
    [Group(37, 1), Group(0, 1), Group(130, 1)], [Group(0, 9), Group(70, 5), Group(3, 1)],
    [Group(13, 9, TREE), Group(64, 3), Group(5, 5, TREE[:5]), Group(9, 1, [-1])]], ids=["decode", "prefill", "verify"])
def test_attention_is_the_references(groups: list[Group], window: int | None) -> None:
    step = make(groups, window=window)
    layout, view, count = step.layout, step.layout.views[0], step.layout.rows
    expected = ReferenceKernels().attend(step.q, step.keys, step.values, layout, view, 0.25)
    # As a captured step has them: padding, long tables of 32-bit numbers, whatever lay there before.
    shape = RowsShape.bucket(ROWS, 1, 8)
    layout.device = DeviceRows.over(shape, torch.full((shape.size,), 77, dtype=torch.int32))
    layout.device.data.copy_(torch.from_numpy(pack(layout, shape)))
    view.slots = torch.cat((view.slots, torch.full((ROWS - count,), -1)))
    view.tables = torch.nn.functional.pad(view.tables, (0, 9, 0, 2), value=1).int()
    view.scratch.clear()
    q = torch.cat((step.q, torch.full((ROWS - count, *step.q.shape[1:]), torch.nan)))
    found = SteppedKernels().attend(q, step.keys, step.values, layout, view, 0.25)
    assert torch.equal(found[:count], expected) and found.shape == q.shape


def test_a_step_of_nothing_but_padding() -> None:
    step = make([Group(4, 2)])
    shape = RowsShape.bucket(2, 1, 0)
    step.layout.device = DeviceRows.over(shape, torch.full((shape.size,), -1, dtype=torch.int32))
    found = SteppedKernels().attend(step.q, step.keys, step.values, step.layout, step.layout.views[0], 0.25)
    assert not found.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_padding_is_not_stored(dtype: torch.dtype) -> None:
    caches = [torch.zeros(6, 2, 4).to(dtype) for _ in range(4)]
    scales = [torch.zeros(6, 2) for _ in range(4)] if dtype.itemsize == 1 else None
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    SteppedKernels().store(*caches[:2], torch.tensor([4, -1, 2]), k, v, None if scales is None else (*scales[:2],))
    ReferenceKernels().store(*caches[2:], torch.tensor([4, 2]), k[::2], v[::2],
                             None if scales is None else (*scales[2:],))
    for left, right in zip(caches[:2], caches[2:]):
        assert torch.equal(left.float(), right.float())
    if scales is not None:
        assert torch.equal(scales[0], scales[2]) and torch.equal(scales[1], scales[3])


def test_padding_is_not_stored_among_latents() -> None:
    cache, k = torch.zeros(6, 1, 4), torch.randn(3, 1, 4)
    SteppedKernels().store_keys(cache, torch.tensor([4, -1, 2]), k)
    assert torch.equal(cache[[4, 2]], k[::2]) and not cache[[0, 1, 3, 5]].any()
