"""Paged attention in a few large calls: gather the blocks of many groups, then one scaled_dot_product_attention.

Which rows share a call is decided once per step (plan.py). Keys are taken in physical order (a tree's own rows come
after its prefix) and a mask says who sees what. What was gathered but belongs to no row is zeroed, so that nothing
foreign, not even a NaN, can reach a result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.kernels.eager.plan import AttentionCall, plan
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.operands import values_in_keys


def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: Layout, view: GroupView,
           scale: float, softcap: float = 0.0) -> torch.Tensor:
    """q [N, H, d], caches [slots, H_kv, d] -> [N, H, d_v]; the contract is Kernels.attend."""
    out: torch.Tensor | None = None
    for call in plan(layout, view, q.dtype):
        if call.rows is None:
            return _run(call, q, k_cache, v_cache, layout.block_size, scale, softcap)
        if out is None:
            out = torch.empty((*q.shape[:2], v_cache.shape[2]), dtype=q.dtype, device=q.device)
        part = _run(call, q.index_select(0, call.rows), k_cache, v_cache, layout.block_size, scale, softcap)
        out.index_copy_(0, call.rows, part)
    return q.new_empty((*q.shape[:2], v_cache.shape[2])) if out is None else out


def _run(call: AttentionCall, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_size: int,
         scale: float, softcap: float) -> torch.Tensor:
    """q [B * n, H, d] of this call -> [B * n, H, d_v]."""
    keys = _gather(call, k_cache, block_size)
    if keys.dtype != q.dtype:
        keys = keys.to(q.dtype)
    if values_in_keys(k_cache, v_cache):
        # Whole keys weighed and the result cut: torch's fast routines want both of one width.
        return _weigh(call, q, keys, keys, scale, softcap)[..., :v_cache.shape[2]]
    values = _gather(call, v_cache, block_size)
    return _weigh(call, q, keys, values if values.dtype == q.dtype else values.to(q.dtype), scale, softcap)


def _weigh(call: AttentionCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
           softcap: float) -> torch.Tensor:
    _, heads, dim = q.shape
    kv_heads = keys.shape[1]
    if softcap:
        return _capped(call, q, keys, values, scale, softcap)
    if call.n == 1:
        # The heads that share a KV head take the place of rows: no copy, and the keys are read once for all.
        query = q.reshape(call.pieces, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(query, keys, values, call.mask, scale=scale).reshape(-1, heads, dim)
    query = q.reshape(call.pieces, call.n, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, keys, values, call.mask, is_causal=call.causal, scale=scale,
                                         enable_gqa=heads != kv_heads)
    return out.transpose(1, 2).reshape(-1, heads, dim)


def _capped(call: AttentionCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
            softcap: float) -> torch.Tensor:
    """The same with capped scores, which torch's own attention does not know."""
    _, heads, dim = q.shape
    kv_heads = keys.shape[1]
    query = q.reshape(call.pieces, call.n, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(query, keys[:, :, None].transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    if call.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask[:, :, None]
    out = torch.matmul(torch.softmax(scores, dim=-1).to(q.dtype), values[:, :, None])
    return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)


def _gather(call: AttentionCall, cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """[B, H_kv, C, d], strided; without a copy where one piece's blocks lie side by side."""
    _, kv_heads, dim = cache.shape
    if call.adjacent is not None:
        # One call instead of a slice, an unsqueeze and a transpose: a single stream feels each.
        start, count = call.adjacent
        width = kv_heads * dim
        return cache.as_strided((1, kv_heads, count, dim), (0, dim, width, 1), cache.storage_offset() + start * width)
    gathered = cache.view(-1, block_size * kv_heads * dim).index_select(0, call.blocks).view(-1, kv_heads, dim)
    if call.stale is not None:
        gathered.index_fill_(0, call.stale, 0)
    if call.part is not None:
        gathered = gathered[call.part]
    return gathered.view(call.pieces, -1, kv_heads, dim).transpose(1, 2)
