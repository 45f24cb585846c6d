"""Products, norms, rotation and cache writes in Triton: the reference's values, and bits without company."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigError
from paceline.kernels import select
from paceline.kernels.operands import Heads, KVCache, Norm

REFERENCE = select(True, torch.device("cpu"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
ROWS = pytest.mark.parametrize("rows", [1, 19])
INPUTS, OUTPUTS, DIM = 96, 24, 16


@pytest.fixture
def random(device: torch.device):
    source = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=source) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)).to(device, dtype)

    return make


def agree(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.cpu().float(), expected.float(), atol=1e-5 if dtype == torch.float32 else 6e-3,
                               rtol=1e-5 if dtype == torch.float32 else 6e-3)


def host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


@DTYPES
@ROWS
def test_products_and_what_is_fused_with_them(kernels, random, rows, dtype):
    x, weight, bias = random(rows, INPUTS, dtype=dtype), random(2 * OUTPUTS, INPUTS, dtype=dtype), \
        random(2 * OUTPUTS, dtype=dtype)
    residual, norm = random(rows, 2 * OUTPUTS, dtype=dtype), Norm(random(INPUTS, dtype=dtype), 1e-5)
    here = Norm(norm.weight.cpu(), norm.eps)
    for offset in (bias, None):
        theirs = None if offset is None else offset.cpu()
        agree(kernels.linear(x, weight, offset), REFERENCE.linear(*host(x, weight), theirs), dtype)
        agree(kernels.gated(x, norm, weight, offset), REFERENCE.gated(x.cpu(), here, weight.cpu(), theirs), dtype)
        agree(kernels.linear_add(x, weight, offset, residual.clone()),
              REFERENCE.linear_add(x.cpu(), weight.cpu(), theirs, residual.cpu()), dtype)
    agree(kernels.gated(x, None, weight, None), REFERENCE.gated(x.cpu(), None, weight.cpu(), None), dtype)
    logits = kernels.head(x, norm, weight)
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    agree(logits, REFERENCE.head(x.cpu(), here, weight.cpu()), dtype)


@DTYPES
@ROWS
@pytest.mark.parametrize(("normed", "rotary"), [(False, DIM), (True, DIM), (False, DIM // 2)])
def test_the_way_into_attention(kernels, random, device, rows, normed, rotary, dtype):
    heads = Heads(6, 2, DIM)
    if normed:
        heads = Heads(6, 2, DIM, Norm(random(DIM, dtype=dtype), 1e-5), Norm(random(DIM, dtype=dtype), 1e-5))
    x, weight, norm = random(rows, INPUTS, dtype=dtype), random(10 * DIM, INPUTS, dtype=dtype), \
        Norm(random(INPUTS, dtype=dtype), 1e-5)
    angles = torch.rand(rows, rotary // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    slots, bias = torch.randperm(30)[:rows], random(10 * DIM, dtype=dtype)
    mine = KVCache(*(torch.zeros(30, 2, DIM, dtype=dtype, device=device) for _ in range(2)))
    theirs = KVCache(*(torch.zeros(30, 2, DIM, dtype=dtype) for _ in range(2)))
    q = kernels.project(x, norm, weight, bias, heads, cos.to(device), sin.to(device), mine, slots.to(device))

    def cpu(norm: Norm | None) -> Norm | None:
        return None if norm is None else Norm(norm.weight.cpu(), norm.eps)

    expected = REFERENCE.project(x.cpu(), cpu(norm), weight.cpu(), bias.cpu(),
                                 Heads(6, 2, DIM, cpu(heads.query_norm), cpu(heads.key_norm)), cos, sin, theirs, slots)
    agree(q, expected, dtype)
    agree(mine.keys, theirs.keys, dtype)
    agree(mine.values, theirs.values, dtype)


@DTYPES
@ROWS
def test_other_norms_and_activations_around_a_product(kernels, random, rows, dtype):
    x, weight = random(rows, INPUTS, dtype=dtype), random(2 * OUTPUTS, INPUTS, dtype=dtype)
    norm = Norm(random(INPUTS, dtype=dtype), 1e-5, centred=True, bias=random(INPUTS, dtype=dtype))
    here = Norm(norm.weight.cpu(), norm.eps, True, norm.bias.cpu())
    agree(kernels.gated(x, norm, weight, None, "gelu_tanh"),
          REFERENCE.gated(x.cpu(), here, weight.cpu(), None, "gelu_tanh"), dtype)
    agree(kernels.gated(x, norm, weight, None), REFERENCE.gated(x.cpu(), here, weight.cpu(), None), dtype)
    agree(kernels.head(x, norm, weight), REFERENCE.head(x.cpu(), here, weight.cpu()), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)])
@ROWS
@pytest.mark.parametrize("kind", ["whole width", "no norm", "layer norm, no rotation"])
def test_other_ways_into_attention(kernels, random, device, rows, kind, dtype):
    """A norm over all heads together; a stream that is not normed; positions that are not rotated in."""
    heads, norm = Heads(6, 2, DIM), None
    if kind == "whole width":
        heads = Heads(6, 2, DIM, Norm(random(6 * DIM, dtype=dtype), 1e-5), Norm(random(2 * DIM, dtype=dtype), 1e-5))
    if kind == "layer norm, no rotation":
        norm = Norm(random(INPUTS, dtype=dtype), 1e-5, True, random(INPUTS, dtype=dtype))
    x, weight = random(rows, INPUTS, dtype=dtype), random(10 * DIM, INPUTS, dtype=dtype)
    angles = torch.rand(rows, 0 if kind == "layer norm, no rotation" else DIM // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    slots = torch.randperm(30)[:rows]
    mine = KVCache(*(torch.zeros(30, 2, DIM, dtype=dtype, device=device) for _ in range(2)))
    theirs = KVCache(*(torch.zeros(30, 2, DIM, dtype=dtype) for _ in range(2)))
    q = kernels.project(x, norm, weight, None, heads, cos.to(device), sin.to(device), mine, slots.to(device))

    def cpu(norm: Norm | None) -> Norm | None:
        return None if norm is None else Norm(norm.weight.cpu(), norm.eps, norm.centred,
                                              None if norm.bias is None else norm.bias.cpu())

    expected = REFERENCE.project(x.cpu(), cpu(norm), weight.cpu(), None,
                                 Heads(6, 2, DIM, cpu(heads.query_norm), cpu(heads.key_norm)), cos, sin, theirs, slots)
    for got, wanted in ((q, expected), (mine.keys, theirs.keys), (mine.values, theirs.values)):
        agree(got, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_normed_together_have_the_bits_of_a_rank_that_normed_them_before(exact, random, device, dtype):
    """Of tensor parallel: no rank has all heads, so they are gathered and normed first, and then turned and stored."""
    qkv, cos, sin = random(5, 10 * DIM, dtype=dtype), *(random(5, 1, DIM) for _ in range(2))
    query_norm, key_norm = Norm(random(6 * DIM, dtype=dtype), 1e-5), Norm(random(2 * DIM, dtype=dtype), 1e-5)
    slots = torch.randperm(30)[:5].to(device)
    whole, rank = (KVCache(*(torch.zeros(30, 2, DIM, dtype=dtype, device=device) for _ in range(2))) for _ in range(2))
    expected = exact.rotate_and_store(qkv, Heads(6, 2, DIM, query_norm, key_norm), cos, sin, whole, slots)
    normed = torch.cat((exact.norm(qkv[:, :6 * DIM].contiguous(), query_norm),
                        exact.norm(qkv[:, 6 * DIM:8 * DIM].contiguous(), key_norm), qkv[:, 8 * DIM:]), dim=-1)
    got = exact.rotate_and_store(normed, Heads(6, 2, DIM), cos, sin, rank, slots)
    assert torch.equal(got, expected) and torch.equal(rank.keys, whole.keys) and torch.equal(rank.values, whole.values)


@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
def test_padding_is_not_stored(kernels, random, device, rows, dtype):
    heads, norm = Heads(2, 1, DIM), Norm(random(INPUTS, dtype=dtype), 1e-5)
    cos, sin = torch.ones(rows, 1, DIM, device=device), torch.zeros(rows, 1, DIM, device=device)
    cache = KVCache(*(torch.zeros(5, 1, DIM, dtype=dtype, device=device) for _ in range(2)))
    slots = torch.full((rows,), -1, device=device)
    x, weight = random(rows, INPUTS, dtype=dtype), random(4 * DIM, INPUTS, dtype=dtype)
    kernels.project(x, norm, weight, None, heads, cos, sin, cache, slots)
    assert not cache.keys.any() and not cache.values.any()
    slots[-1] = 3
    kernels.store(cache.keys, cache.values, slots, random(rows, 1, DIM), random(rows, 1, DIM))
    assert cache.keys.any(-1).nonzero()[:, 0].tolist() == cache.values.any(-1).nonzero()[:, 0].tolist() == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches_are_written_as_the_reference_does(kernels, random, device, dtype):
    if device.type == "cpu":
        pytest.skip("the interpreter does not round to float8 as the card does")
    k, v = random(9, 2, 64, dtype=dtype), random(9, 2, 64, dtype=dtype)
    k[4] = 0
    caches = [[torch.zeros(20, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2)] for _ in range(2)]
    scales = [[torch.zeros(20, 2, device=device) for _ in range(2)] for _ in range(2)]
    slots = torch.randperm(20, device=device)[:9]
    for backend, cache, scale in zip((kernels, select(True, device)), caches, scales):
        backend.store(*cache, slots, k, v, (scale[0], scale[1]))
    for mine, theirs in zip(caches[0] + scales[0], caches[1] + scales[1]):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0, rtol=0.13)


@DTYPES
def test_rows_between_the_products(kernels, random, dtype):
    x, weight = random(5, 3, INPUTS, dtype=dtype), random(INPUTS, dtype=dtype)
    agree(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(*host(x, weight), 1e-5), dtype)
    agree(kernels.rms_norm(x, weight.float(), 1e-5), REFERENCE.rms_norm(x.cpu(), weight.cpu().float(), 1e-5), dtype)
    bias = random(INPUTS, dtype=dtype)
    for offset in (bias, None):
        agree(kernels.layer_norm(x + 3, weight, offset, 1e-5),
              REFERENCE.layer_norm((x + 3).cpu(), weight.cpu(), None if offset is None else bias.cpu(), 1e-5), dtype)
    for activation in ("silu", "gelu", "gelu_tanh"):
        wide = random(3, 2 * INPUTS, dtype=dtype) * 50
        agree(kernels.activate(wide[:, :INPUTS], activation), REFERENCE.activate(wide.cpu()[:, :INPUTS], activation),
              dtype)
    gate_up = random(3, INPUTS, dtype=dtype) * 50
    agree(kernels.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.cpu()), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(dtype, marks=pytest.mark.gpu)
                                                    for dtype in (torch.float16, torch.bfloat16))])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 40), (1536, 24)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(exact, random, device, inputs, outputs, dtype):
    if dtype != torch.float32 and device.type == "cpu":
        pytest.skip("a tile's order of sums is the tensor cores': the interpreter's depends on its size")
    rows = 16 if device.type == "cpu" else 300
    x, weight, norm = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype), \
        Norm(random(inputs, dtype=dtype), 1e-5)
    whole = exact.linear(x, weight), exact.gated(x, norm, weight, None), exact.head(x, norm, weight)
    for first, last in ((0, 1), (5, 9), (rows - 1, rows)):
        part = x[first:last].clone()
        for got, all_rows in zip((exact.linear(part, weight), exact.gated(part, norm, weight, None),
                                  exact.head(part, norm, weight)), whole):
            assert torch.equal(got, all_rows[first:last])


def test_without_triton_the_error_says_what_to_do(monkeypatch):
    import sys

    from paceline.kernels import triton as package
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="Triton"):
        package.load(False, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [3, 12, 40])
def test_long_rows_are_summed_in_pieces(kernels, random, rows, dtype):
    """Side by side in one program, one after the other, or a program each: three pieces, the last of them short."""
    x, weight, residual = random(rows, 1100, dtype=dtype), random(24, 1100, dtype=dtype), random(rows, 24, dtype=dtype)
    agree(kernels.linear(x, weight), REFERENCE.linear(*host(x, weight)), dtype)
    agree(kernels.linear_add(x, weight, None, residual.clone()),
          REFERENCE.linear_add(x.cpu(), weight.cpu(), None, residual.cpu()), dtype)


def test_the_vendors_pieces_are_added_in_order(random):
    from paceline.kernels.triton import vendor
    x, weight, residual = random(5, 300), random(24, 300), random(5, 24)
    for piece in (0, 100, 160):
        agree(vendor.in_pieces(x, weight, piece, torch.float32), x @ weight.t(), torch.float32)
        agree(vendor.in_pieces(x, weight, piece, torch.float32, residual.clone()), x @ weight.t() + residual,
              torch.float32)
