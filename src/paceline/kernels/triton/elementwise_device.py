# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What happens between the matrix products: norms, rotation, cache writes, SiLU. Float32 inside, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.overlap_device import start


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    start(OVERLAP)
    wide = tl.load(x + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 0) / SIZE
    normed = wide / tl.sqrt(mean + eps) * w
    tl.store(out + row * SIZE + i, normed.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
                      BIASED: tl.constexpr, OVERLAP: tl.constexpr):
    """One program per row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    start(OVERLAP)
    wide = tl.load(x + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    wide = tl.where(i < SIZE, wide - tl.sum(wide, 0) / SIZE, 0.0)
    normed = wide / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps) * w
    if BIASED:
        normed += tl.load(bias + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, normed.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def activate_kernel(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
                    OVERLAP: tl.constexpr):
    """Grid (rows, blocks of features)."""
    start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if KIND == "gelu":
        y = v * (1.0 + tl.erf(v * 0.7071067811865476)) * 0.5
    elif KIND == "gelu_tanh":  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 u)
        y = v / (1.0 + tl.exp((v + 0.044715 * v * v * v) * -1.5957691216057308))
    else:
        tl.static_assert(KIND == "silu")
        y = v / (1.0 + tl.exp(-v))
    tl.store(out + row * SIZE + i, y.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def silu_mul_kernel(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (rows, blocks of features)."""
    start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def put(cache, scales, slot, head, stride, first, second, d, half_mask, write, KV_HEADS: tl.constexpr,
        DIM: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr):
    """The two halves [H, half] of some heads' vectors into their slot; rounded to codes where the cache has scales."""
    if SCALED:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = largest / LARGEST
        divisor = tl.where(scale > 0.0, scale, 1.0)[:, None]
        first = first / divisor
        second = second / divisor
        tl.store(scales + slot * KV_HEADS + head, scale, mask=write)
    at = cache + slot * stride + head[:, None] * DIM + d[None, :]
    cells = write[:, None] & half_mask[None, :]
    tl.store(at, first.to(cache.dtype.element_ty), mask=cells)
    tl.store(at + HALF, second.to(cache.dtype.element_ty), mask=cells)


@triton.jit
def rotate_and_store_kernel(qkv, q_out, keys, values, key_scales, value_scales, slots, cos, sin, q_weight, k_weight,
                            stride, q_stride, key_stride, value_stride, eps, HEADS: tl.constexpr,
                            KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
                            BLOCK_H: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr,
                            LARGEST: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (rows, blocks of heads). HALF: of the head's features; all of them turn (TURNED) or none (values only)."""
    start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    there = h < HEADS + 2 * KV_HEADS
    is_q = h < HEADS
    is_v = h >= HEADS + KV_HEADS
    low = d < HALF
    cells = there[:, None] & low[None, :]
    at = qkv + row * stride + h[:, None] * DIM + d[None, :]
    a = tl.load(at, mask=cells, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=cells, other=0.0).to(tl.float32)
    if TURNED:
        x, y = a, b
        if NORMED:
            mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM
            root = tl.sqrt(mean + eps)[:, None]
            qw = tl.load(q_weight + d, mask=low, other=0.0).to(tl.float32)[None, :]
            kw = tl.load(k_weight + d, mask=low, other=0.0).to(tl.float32)[None, :]
            x = x / root * tl.where(is_q[:, None], qw, kw)
            qw = tl.load(q_weight + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
            kw = tl.load(k_weight + HALF + d, mask=low, other=0.0).to(tl.float32)[None, :]
            y = y / root * tl.where(is_q[:, None], qw, kw)
        angle = row * DIM + d
        c = tl.load(cos + angle, mask=low, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=low, other=0.0)[None, :]
        first = x * c + y * s
        c = tl.load(cos + angle + HALF, mask=low, other=0.0)[None, :]
        s = tl.load(sin + angle + HALF, mask=low, other=0.0)[None, :]
        second = y * c + x * s
        a = tl.where(is_v[:, None], a, first)
        b = tl.where(is_v[:, None], b, second)
        q_at = q_out + row * q_stride + h[:, None] * DIM + d[None, :]
        q_cells = cells & is_q[:, None]
        tl.store(q_at, a.to(q_out.dtype.element_ty), mask=q_cells)
        tl.store(q_at + HALF, b.to(q_out.dtype.element_ty), mask=q_cells)
    write = there & (h * 0 + slot >= 0)  # padding has no slot
    put(keys, key_scales, slot, h - HEADS, key_stride, a, b, d, low, write & (h >= HEADS) & (h < HEADS + KV_HEADS),
        KV_HEADS, DIM, HALF, SCALED, LARGEST)
    put(values, value_scales, slot, h - HEADS - KV_HEADS, value_stride, a, b, d, low, write & is_v, KV_HEADS, DIM, HALF,
        SCALED, LARGEST)
