"""Which kernels there are by default: exact ones wherever there are some."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.tiny import tiny_llm, tiny_model
from paceline.kernels import select

CPU = torch.device("cpu")


@pytest.mark.parametrize(("deterministic", "name", "exact"), [
    (None, "eager", False), (False, "eager", False), (True, "reference", True)])
def test_plain_torch_on_a_cpu_is_exact_where_asked(deterministic: bool | None, name: str, exact: bool) -> None:
    kernels = select(deterministic, CPU)
    assert kernels.name == name and kernels.deterministic is exact


@pytest.mark.parametrize(("deterministic", "exact"), [(None, True), (False, False), (True, True)])
def test_kernels_of_a_card_are_exact_unless_told(deterministic: bool | None, exact: bool) -> None:
    pytest.importorskip("triton")
    assert select(deterministic, CPU, "triton").deterministic is exact


@pytest.mark.parametrize(("options", "said"), [
    ({"deterministic": None, "speculation": "ngram"}, True), ({"deterministic": None}, False),
    ({"deterministic": False, "speculation": "ngram"}, False),
    ({"deterministic": True, "speculation": "ngram"}, False)])
def test_the_one_exception_is_named(options: dict[str, object], said: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tiny_llm(tiny_model(), **options)
    assert ("plain torch on a CPU" in caplog.text) is said


def test_the_vendor_is_not_asked_for_what_was_not_compared() -> None:
    pytest.importorskip("triton")
    from paceline.kernels.triton.choices import choose
    from paceline.kernels.triton.vendor import ComparedShapes
    x, weight = torch.ones(256, 32), torch.ones(8, 32)
    how = choose(256, 8, 32, torch.float32, True, False)
    assert not ComparedShapes(torch.zeros(4, dtype=torch.int32)).same(x, weight, how, torch.float32)


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself, on the CPU: with what our tiles give, and with one place of it moved by a bit."""
    pytest.importorskip("triton")
    from paceline.kernels.triton import vendor
    from paceline.kernels.triton.choices import choose
    x, weight = torch.ones(32, 40), torch.randn(8, 40)
    how = choose(32, 8, 40, torch.float32, True, False)
    shapes = vendor.ComparedShapes(torch.zeros(4, dtype=torch.int32))

    def ours(x: torch.Tensor, weight: torch.Tensor, piece: int, dtype: torch.dtype) -> torch.Tensor:
        return vendor.product(x, weight, None, how, torch.zeros(4, dtype=torch.int32), dtype=dtype, exact=True)

    monkeypatch.setattr(vendor, "in_pieces", ours)
    assert all(shapes._compare(x, weight, how, torch.float32, seed) for seed in range(3))

    def moved(*given: object) -> torch.Tensor:
        out = ours(*given)  # type: ignore[arg-type]
        out[5, 3] = torch.nextafter(out[5, 3], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(vendor, "in_pieces", moved)
    assert not shapes._compare(x, weight, how, torch.float32, 2)


@pytest.mark.parametrize(("size", "inputs"), [
    (576, 1536), (4096, 14336), (4096, 4096), (960, 576), (2048, 6144), (320, 1100)])
@pytest.mark.parametrize("gated", [False, True])
def test_pieces_are_a_matter_of_the_matrix_alone(size: int, inputs: int, gated: bool) -> None:
    pytest.importorskip("triton")
    from paceline.kernels.triton.choices import Way, choose, piece_of
    piece = piece_of(size, inputs, gated)
    assert piece == 0 or 4 * piece >= inputs > piece
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            how = choose(rows, size, inputs, dtype, True, gated)
            assert (how.piece or inputs) == (piece or inputs)
            assert piece % how.block_k == 0 or how.way is Way.ABREAST, "pieces are whole blocks"
