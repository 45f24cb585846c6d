"""The layers the architectures share. Plain objects over tensors; the kernels come with each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads, Norm
from paceline.kernels.packed import Weight
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import WeightSource
from paceline.models.packing import COLUMNS, PackingWeights


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None,
                 modules: Sequence[tuple[str, int]] = ()) -> None:
        self.weight = weight
        self.bias = bias
        self.modules = tuple(modules)
        """Name and rows of what lies stacked in the weight, as checkpoints call it; () where rows lie otherwise."""

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return kernels.linear(x, self.weight, self.bias)


def load_matrix(weights: WeightSource, names: list[str], rows: list[int], cols: int) -> Weight:
    """The tensors [rows, cols] of these names, stacked; packed where the source packs."""
    if isinstance(weights, PackingWeights) and cols % COLUMNS == 0:
        packed = weights.matrix(list(zip(names, rows, strict=True)), cols)
        weights.let_go()
        return packed
    parts = [weights.take(name, (size, cols)) for name, size in zip(names, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_linear(weights: WeightSource, names: list[str], out: list[int], inputs: int, bias: bool) -> Linear:
    """One Linear from the tensors `<name>.weight` [out, inputs] (and `<name>.bias`), stacked: fewer, larger calls."""
    weight = load_matrix(weights, [f"{name}.weight" for name in names], out, inputs)
    modules = list(zip(names, out, strict=True))
    if not bias:
        return Linear(weight, modules=modules)
    biases = [weights.take(f"{name}.bias", (size,)) for name, size in zip(names, out, strict=True)]
    return Linear(weight, biases[0] if len(biases) == 1 else torch.cat(biases), modules)


class Attention:
    """Grouped-query attention with rotary positions; optionally a norm on each head's queries and keys."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int, *, qkv_bias: bool, out_bias: bool,
                 qk_norm: bool = False) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = dim ** -0.5
        self.qkv = load_linear(weights, [f"{prefix}.{part}_proj" for part in "qkv"],
                               [heads * dim, kv_heads * dim, kv_heads * dim], config.hidden_size, qkv_bias)
        self.out = load_linear(weights, [f"{prefix}.o_proj"], [config.hidden_size], heads * dim, out_bias)

        def norm(part: str) -> Norm | None:
            return Norm(weights.take(f"{prefix}.{part}_norm.weight", (dim,)), config.norm_eps) if qk_norm else None

        self.heads = Heads(heads, kv_heads, dim, norm("q"), norm("k"))

    def __call__(self, x: torch.Tensor, norm: Norm, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """x + attention(norm x), of these rows only where some are named; x may be overwritten."""
        kernels, cache, view = context.kernels, context.cache(self.layer), context.view(self.layer)
        q = kernels.project(x, norm, self.qkv.weight, self.qkv.bias, self.heads, cos, sin, cache, view.slots)
        mixed = kernels.attend(q, cache.keys, cache.values, context.layout, view, self.scale, cache.scales)
        mixed = mixed.reshape(x.shape[0], -1)
        if rows is not None:
            mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
        return kernels.linear_add(mixed, self.out.weight, self.out.bias, x)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]


class AttentionLayer(Protocol):
    def __call__(self, x: torch.Tensor, norm: Norm, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """[N, h] -> x + attention(norm x), of these rows only where some are named; x may be overwritten."""
        ...


class FeedForward(Protocol):
    def __call__(self, x: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
        """[N, h] -> x + feed_forward(norm x); x may be overwritten."""
        ...


class GatedMLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, *, bias: bool = False,
                 names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
                 inner: int | None = None) -> None:
        """`inner`: features between the projections, where they are not config.intermediate_size."""
        gate, up, down = (f"{prefix}.{name}" for name in names)
        inner = inner or config.intermediate_size
        self.gate_up = load_linear(weights, [gate, up], [inner, inner], config.hidden_size, bias)
        self.down = load_linear(weights, [down], [config.hidden_size], inner, bias)

    def __call__(self, x: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
        inner = kernels.gated(x, norm, self.gate_up.weight, self.gate_up.bias)
        return kernels.linear_add(inner, self.down.weight, self.down.bias, x)

    def alone(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Without norm and residual: an expert among others."""
        return self.down(kernels.gated(x, None, self.gate_up.weight, self.gate_up.bias), kernels)

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]


class Router(Protocol):
    def __call__(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, h] -> of each row the weights [N, chosen] float32 and ids [N, chosen] int64 of its experts."""
        ...


class SoftmaxRouter:
    """The `chosen` experts of the highest scores, weighed by their softmax (Kernels.route)."""

    def __init__(self, scores: Linear, chosen: int, *, renormalise: bool) -> None:
        self.scores = scores
        self.chosen = chosen
        self.renormalise = renormalise

    def __call__(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.route(self.scores(x, kernels), self.chosen, self.renormalise)


class MixtureOfExperts:
    """Each row goes to its best experts; their outputs are added in order of the expert's index, to that of `shared`,
    which every row goes through where there is one."""

    def __init__(self, router: Router, experts: list[GatedMLP], shared: GatedMLP | None = None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
        normed = kernels.rms_norm(x, norm.weight, norm.eps)
        weights, ids = self.router(normed, kernels)
        if self.shared is None:
            out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        else:
            out = self.shared.alone(normed, kernels).float()
        # One expert after the other, each row at most once in each: every row sums in the same order, with no
        # atomics, whoever shares its experts.
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(ids == index)
            if len(rows):
                mixed = expert.alone(normed.index_select(0, rows), kernels) * weights[rows, place][:, None]
                out.index_copy_(0, rows, out.index_select(0, rows) + mixed)
        return x + out.to(x.dtype)
