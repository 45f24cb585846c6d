"""The layers the architectures share. Plain objects over tensors; the kernels come with each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.errors import ModelFormatError
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads, Norm
from paceline.kernels.packed import Weight
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.packing import COLUMNS, PackingWeights
from paceline.models.translate import Module, module_of
from paceline.models.weight_source import WeightSource


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None,
                 modules: Sequence[Module] = ()) -> None:
        self.weight = weight
        self.bias = bias
        self.modules = tuple(modules)
        """What lies stacked in the weight; () where that cannot be told apart."""

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
    modules = [module_of(weights, name, size) for name, size in zip(names, out, strict=True)]
    if not bias:
        return Linear(weight, modules=modules)
    biases = [weights.take(f"{name}.bias", (size,)) for name, size in zip(names, out, strict=True)]
    return Linear(weight, biases[0] if len(biases) == 1 else torch.cat(biases), modules)


class Attention:
    """Grouped-query attention with rotary positions (or none); optionally norms on queries, keys and the result."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int, *, qkv_bias: bool, out_bias: bool,
                 qk_norm: bool = False, query_norm: Norm | None = None, key_norm: Norm | None = None,
                 fused: bool = False, after: Norm | None = None) -> None:
        """qk_norm: each head has one, under its usual name; query_norm, key_norm: others. fused: the checkpoint holds
        queries, keys and values as one matrix. after: norms what is added to the stream."""
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale, self.softcap, self.after = config.attention_scale, config.score_cap, after
        parts, sizes = [f"{prefix}.{part}_proj" for part in "qkv"], [heads * dim, kv_heads * dim, kv_heads * dim]
        if config.kv_source(layer) != layer:  # queries only, for the keys and values of another layer
            if fused:
                raise ModelFormatError("config.json: num_kv_shared_layers is not supported where a checkpoint holds "
                                       "queries, keys and values as one matrix.")
            kv_heads, parts, sizes = 0, parts[:1], sizes[:1]
        elif fused:
            parts, sizes = [f"{prefix}.qkv_proj"], [sum(sizes)]
        self.qkv = load_linear(weights, parts, sizes, config.hidden_size, qkv_bias)
        self.out = load_linear(weights, [f"{prefix}.o_proj"], [config.hidden_size], heads * dim, out_bias)
        if qk_norm:
            query_norm, key_norm = (Norm(weights.take(f"{prefix}.{part}_norm.weight", (dim,)), config.norm_eps)
                                    if part == "q" or kv_heads else None for part in "qk")
        self.heads = Heads(heads, kv_heads, dim, query_norm, key_norm)

    def __call__(self, x: torch.Tensor, norm: Norm | None, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """x + attention(norm x), of these rows only where some are named; x may be overwritten."""
        kernels, cache, view = context.kernels, context.cache(self.layer), context.view(self.layer)
        q = kernels.project(x, norm, self.qkv.weight, self.qkv.bias, self.heads, cos, sin, cache, view.slots)
        mixed = kernels.attend(q, cache.keys, cache.values, context.layout, view, self.scale, cache.scales,
                               self.softcap)
        mixed = mixed.reshape(x.shape[0], -1)
        if rows is not None:
            mixed, x = mixed.index_select(0, rows), x.index_select(0, rows)
            kernels = context.keep(rows)
        return add(x, mixed, self.out, self.after, kernels)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]


def add(onto: torch.Tensor, x: torch.Tensor, linear: Linear, after: Norm | None, kernels: Kernels) -> torch.Tensor:
    """onto + after(linear(x)): how a sublayer ends. `onto` may be overwritten."""
    if after is None:
        return kernels.linear_add(x, linear.weight, linear.bias, onto)
    return onto + kernels.norm(linear(x, kernels).contiguous(), after)


class AttentionLayer(Protocol):
    def __call__(self, x: torch.Tensor, norm: Norm | None, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """[N, h] -> x + attention(norm x), of these rows only where some are named; x may be overwritten."""
        ...


class FeedForward(Protocol):
    def __call__(self, x: torch.Tensor, norm: Norm | None, kernels: Kernels,
                 onto: torch.Tensor | None = None) -> torch.Tensor:
        """[N, h] -> onto + feed_forward(norm x), onto x itself where nothing else is named; what it is added onto may
        be overwritten."""
        ...


class MLP:
    """down(activation(up x))."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, *, bias: bool) -> None:
        self.activation = config.activation
        self.up = load_linear(weights, [f"{prefix}.up_proj"], [config.intermediate_size], config.hidden_size, bias)
        self.down = load_linear(weights, [f"{prefix}.down_proj"], [config.hidden_size], config.intermediate_size, bias)

    def __call__(self, x: torch.Tensor, norm: Norm | None, kernels: Kernels,
                 onto: torch.Tensor | None = None) -> torch.Tensor:
        inner = kernels.activate(self.up(kernels.norm(x, norm), kernels), self.activation)
        return add(x if onto is None else onto, inner, self.down, None, kernels)

    def linears(self) -> list[Linear]:
        return [self.up, self.down]


class GatedMLP:
    """down(activation(gate x) * up x); optionally a norm on the result."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, *, bias: bool = False,
                 names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
                 inner: int | None = None, fused: bool = False, after: Norm | None = None) -> None:
        """`inner`: features between the projections, where they are not config.intermediate_size. fused: the
        checkpoint holds gate and up as one matrix. after: norms what is added to the stream."""
        gate, up, down = (f"{prefix}.{name}" for name in names)
        inner = inner or config.intermediate_size
        self.activation, self.after = config.activation, after
        parts, sizes = ([f"{prefix}.gate_up_proj"], [2 * inner]) if fused else ([gate, up], [inner, inner])
        self.gate_up = load_linear(weights, parts, sizes, config.hidden_size, bias)
        self.down = load_linear(weights, [down], [config.hidden_size], inner, bias)

    def __call__(self, x: torch.Tensor, norm: Norm | None, kernels: Kernels,
                 onto: torch.Tensor | None = None) -> torch.Tensor:
        inner = kernels.gated(x, norm, self.gate_up.weight, self.gate_up.bias, self.activation)
        return add(x if onto is None else onto, inner, self.down, self.after, kernels)

    def alone(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Without norm and residual: an expert among others."""
        return self.down(kernels.gated(x, None, self.gate_up.weight, self.gate_up.bias, self.activation), kernels)

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

    def __call__(self, x: torch.Tensor, norm: Norm | None, kernels: Kernels,
                 onto: torch.Tensor | None = None) -> torch.Tensor:
        normed = kernels.norm(x, norm)
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
        return (x if onto is None else onto) + out.to(x.dtype)
