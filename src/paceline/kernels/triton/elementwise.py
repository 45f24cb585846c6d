"""Launching the kernels between the matrix products."""

from __future__ import annotations

import torch
import triton

from paceline.kernels.operands import Heads, KVCache
from paceline.kernels.reference.quantised import LARGEST
from paceline.kernels.triton.elementwise_device import (
    activate_kernel,
    layer_norm_kernel,
    rms_norm_kernel,
    rotate_and_store_kernel,
    silu_mul_kernel,
)
from paceline.kernels.triton.launch import overlapped

HEADS_AT_ONCE = 8
"""Of a program. However few there are: how the threads add up what norms a head depends on the tile's shape, and a rank
that has some of the heads must have the bits of one that has all."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., K] -> the same shape, contiguous."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(flat.shape[0],)](flat, weight, out, flat.stride(0), eps, SIZE=size, BLOCK=block,
                                      num_warps=min(8, max(1, block // 512)), **overlapped(x.device, *flat.shape))
    return out.view(x.shape)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., K] -> the same shape, contiguous."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    layer_norm_kernel[(flat.shape[0],)](flat, weight, weight if bias is None else bias, out, flat.stride(0), eps,
                                        SIZE=size, BLOCK=block, BIASED=bias is not None,
                                        num_warps=min(8, max(1, block // 512)), **overlapped(x.device, *flat.shape))
    return out.view(x.shape)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[N, F], rows at any stride -> contiguous."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    activate_kernel[(rows, triton.cdiv(size, block))](x, out, x.stride(0), SIZE=size, BLOCK=block, KIND=activation,
                                                      num_warps=4, **overlapped(out.device, rows, size))
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2 F] -> [N, F]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    silu_mul_kernel[(rows, triton.cdiv(size, block))](gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block,
                                                      num_warps=4, **overlapped(out.device, rows, size))
    return out


def turns_whole_heads(heads: Heads, cos: torch.Tensor) -> bool:
    """Whether the fused kernels know this rotation: all features of a head, in two halves, normed head by head;
    and keys beside queries."""
    alike = heads.normed_apart and (heads.query_norm is None) == (heads.key_norm is None)
    return heads.keys > 0 and cos.shape[-1] == heads.dim and alike


def rotate_and_store(qkv: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor, cache: KVCache,
                     slots: torch.Tensor, fused: bool = True) -> torch.Tensor:
    """Kernels.rotate_and_store for heads that turn as a whole. cos, sin [N, 1, d] contiguous. `fused`: whether the
    compiler may fuse multiplications and additions."""
    rows, dim, half = qkv.shape[0], heads.dim, heads.dim // 2
    q = torch.empty((rows, heads.query, dim), dtype=qkv.dtype, device=qkv.device)
    everything = heads.query + 2 * heads.keys
    weight = qkv if heads.query_norm is None else heads.query_norm.weight
    key_weight = qkv if heads.key_norm is None else heads.key_norm.weight
    key_scales, value_scales = (cache.keys, cache.values) if cache.scales is None else cache.scales
    rotate_and_store_kernel[(rows, triton.cdiv(everything, HEADS_AT_ONCE))](
        qkv, q if heads.query else qkv, cache.keys, cache.values, key_scales, value_scales, slots, cos, sin, weight,
        key_weight, qkv.stride(0), q.stride(0), cache.keys.stride(0), cache.values.stride(0),
        0.0 if heads.query_norm is None else heads.query_norm.eps, HEADS=heads.query, KV_HEADS=heads.keys, DIM=dim,
        HALF=half, BLOCK_D=triton.next_power_of_2(half), BLOCK_H=HEADS_AT_ONCE, TURNED=True,
        NORMED=heads.query_norm is not None, SCALED=cache.scales is not None,
        LARGEST=LARGEST.get(cache.keys.dtype, 1.0), enable_fp_fusion=fused, num_warps=4,
        **overlapped(q.device, rows, qkv.shape[1]))
    return q


def store(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          scales: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Kernels.store, passing by rows whose slot is -1."""
    rows, kv_heads, dim = k.shape
    packed = torch.cat((k, v), dim=1)
    half = dim // 2
    key_scales, value_scales = (k_cache, v_cache) if scales is None else scales
    rotate_and_store_kernel[(rows, triton.cdiv(2 * kv_heads, HEADS_AT_ONCE))](
        packed, packed, k_cache, v_cache, key_scales, value_scales, slots, packed, packed, packed, packed,
        packed.stride(0), 0, k_cache.stride(0), v_cache.stride(0), 0.0, HEADS=0, KV_HEADS=kv_heads, DIM=dim, HALF=half,
        BLOCK_D=triton.next_power_of_2(half), BLOCK_H=HEADS_AT_ONCE, TURNED=False, NORMED=False,
        SCALED=scales is not None, LARGEST=LARGEST.get(k_cache.dtype, 1.0), num_warps=4,
        **overlapped(k.device, rows, kv_heads * dim))
