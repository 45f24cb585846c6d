"""DSpark's attention: one softmax over the context before the anchor and the whole block."""

from __future__ import annotations

import torch

from paceline.training.networks.dspark import attend


def test_attention_is_one_softmax_over_context_and_block() -> None:
    torch.manual_seed(0)
    size, count, block, heads, groups, dim, length = 2, 3, 4, 4, 2, 6, 11
    q = torch.randn(size, count, block, heads, dim)
    keys, values = torch.randn(2, size, length, groups, dim)
    own_keys, own_values = torch.randn(2, size, count, block, groups, dim)
    anchors = torch.tensor([[0, 4, 10], [3, 3, 7]])
    out = attend(q, keys, values, own_keys, own_values, anchors).view(size, count, block, heads, dim)
    for b in range(size):
        for a in range(count):
            before = int(anchors[b, a])
            k = torch.cat([keys[b, :before], own_keys[b, a]]).repeat_interleave(heads // groups, 1)
            v = torch.cat([values[b, :before], own_values[b, a]]).repeat_interleave(heads // groups, 1)
            weights = (torch.einsum("khd,thd->hkt", q[b, a], k) * dim ** -0.5).softmax(-1)
            torch.testing.assert_close(out[b, a], torch.einsum("hkt,thd->khd", weights, v))
