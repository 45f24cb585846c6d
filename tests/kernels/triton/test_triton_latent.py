"""Latent attention and products by head in Triton: the oracle's values for every kind of step, and in deterministic
mode bits without company."""

from __future__ import annotations

import pytest
import torch
from paged_steps import LATENT, TREE, Group, Step, latent_step, oracle

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


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_half_precision(kernels, device, dtype):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 matrices as integers")
    step = on(latent_step(STEPS["trees"]), device, dtype)
    expected = oracle(STEPS["trees"], latent_step(STEPS["trees"]))
    got = attend(kernels, step)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-2 if dtype == torch.float16 else 5e-2, rtol=0)


@pytest.mark.parametrize(("processors", "room", "window"), [
    pytest.param(0, 0, None, id="one after the other"), pytest.param(99, 0, 300, id="side by side, row by row, window"),
    pytest.param(99, latent.MOST_RESULTS, None, id="side by side"),
    *(pytest.param(processors, room, window, marks=pytest.mark.full)
      for processors, room, window in ((0, 0, 300), (99, 0, None), (99, latent.MOST_RESULTS, 300)))])
def test_the_same_bits_in_any_company_and_way(exact, device, window, processors, room, monkeypatch):
    """Alone its spans run side by side; in company they run as there are programs, and room for what they find."""
    groups = STEPS["everything"]
    exact._processors = 99
    alone = [attend(exact, on(latent_step([group], window=window, place=index), device))
             for index, group in enumerate(groups)]
    exact._processors = processors
    monkeypatch.setattr(latent, "MOST_RESULTS", room)
    together = attend(exact, on(latent_step(groups, window=window), device))
    assert torch.equal(torch.cat(alone), together)


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
