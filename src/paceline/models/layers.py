"""The layers the architectures share. Plain objects over tensors; the kernels come with each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from paceline.errors import ModelFormatError
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Heads, Norm
from paceline.kernels.packed import Weight, part_of
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.packing import COLUMNS, PackingWeights
from paceline.models.part import Held, Part
from paceline.models.shard import WHOLE, HeadShare, Shard, shard_of
from paceline.models.split import AddingLinear, GatheringLinear, Linear, parted, unshared
from paceline.models.translate import module_of
from paceline.models.weight_source import WeightSource

__all__ = ["MLP", "Attention", "AttentionLayer", "FeedForward", "GatedMLP", "Linear", "MixtureOfExperts", "Router",
           "SoftmaxRouter", "load_experts", "load_linear", "load_matrix"]


def load_matrix(weights: WeightSource, names: list[str], rows: list[int], cols: int) -> Weight:
    """The tensors [rows, cols] of these names, stacked; packed where the source packs."""
    if isinstance(weights, PackingWeights) and cols % COLUMNS == 0:
        packed = weights.matrix(list(zip(names, rows, strict=True)), cols)
        weights.let_go()
        return packed
    parts = [weights.take(name, (size, cols)) for name, size in zip(names, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_linear(weights: WeightSource, names: list[str], out: list[int], inputs: int, bias: bool,
                rows: Sequence[Part | None] | None = None) -> Linear:
    """One Linear from the tensors `<name>.weight` [out, inputs] (and `<name>.bias`), stacked: fewer, larger calls.
    rows: of each tensor the outputs that this rank keeps; None: all."""
    modules = [module_of(weights, name, size) for name, size in zip(names, out, strict=True)]
    own = {name: ((size, inputs), part) for name, size, part in zip(names, out, rows or [None] * len(out), strict=True)
           if part is not None}
    weights = parted(weights, {f"{name}.weight": found for name, found in own.items()}
                     | {f"{name}.bias": (shape[:1], part) for name, (shape, part) in own.items()})
    sizes, whole = out, sum(out)
    out = [own[name][1].count if name in own else size for name, size in zip(names, out)]
    weight = part_of(load_matrix(weights, [f"{name}.weight" for name in names], out, inputs), whole)
    held = Held((whole, inputs), None if rows is None else stacked(rows, sizes))
    if not bias:
        return Linear(weight, None, modules, held)
    biases = [weights.take(f"{name}.bias", (size,)) for name, size in zip(names, out, strict=True)]
    return Linear(weight, biases[0] if len(biases) == 1 else torch.cat(biases), modules, held)


def load_return(weights: WeightSource, name: str, out: int, widths: Sequence[int], bias: bool) -> Linear:
    """The Linear by which a sublayer leads back into the stream of `out` features. Of its inputs each rank has as many
    as `widths` says; a single number: every rank has all of them, and the matrix."""
    shard, inputs = shard_of(weights), sum(widths)
    if len(widths) == 1:
        return load_linear(weights, [name], [out], inputs, bias)
    if shard.exact:
        own = load_linear(weights, [name], [out], inputs, bias, [shard.rows(out)])
        return GatheringLinear(own, shard, widths, shard.widths(out))
    begin = sum(widths[:shard.rank])
    part = Part(1, ((begin, begin + widths[shard.rank]),))
    own = load_linear(parted(weights, {f"{name}.weight": ((out, inputs), part)}), [name], [out], part.count, bias)
    return AddingLinear(Linear(own.weight, own.bias, [module_of(weights, name, out)],
                               Held((out, inputs), columns=part)), shard)


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
        shard = shard_of(weights)
        share = shard.heads(config)
        parts, sizes = [f"{prefix}.{part}_proj" for part in "qkv"], [heads * dim, kv_heads * dim, kv_heads * dim]
        rows = head_rows(share, dim)
        if config.kv_source(layer) != layer:  # queries only, for the keys and values of another layer
            if fused:
                raise ModelFormatError("config.json: num_kv_shared_layers is not supported where a checkpoint holds "
                                       "queries, keys and values as one matrix.")
            share, parts, sizes, rows = replace(share, keys=0), parts[:1], sizes[:1], rows[:1]
        elif fused:
            parts, rows = [f"{prefix}.qkv_proj"], [stacked(rows, sizes)]
            sizes = [sum(sizes)]
        self.qkv = load_linear(weights, parts, sizes, config.hidden_size, qkv_bias, rows)
        widths = [share.query * dim] * (shard.size if share.split else 1)
        self.out = load_return(weights, f"{prefix}.o_proj", config.hidden_size, widths, out_bias)
        if qk_norm:
            query_norm, key_norm = (Norm(weights.take(f"{prefix}.{part}_norm.weight", (dim,)), config.norm_eps)
                                    if part == "q" or share.keys else None for part in "qk")
        self.heads = Heads(share.query, share.keys, dim, query_norm, key_norm)
        self.joint: JointNorms | None = None
        """Norms over the heads of all ranks, which none has together."""
        if share.split and query_norm is not None and key_norm is not None and query_norm.weight.shape[0] != dim:
            self.joint = JointNorms(query_norm, key_norm, shard, share, dim)
            self.heads = Heads(share.query, share.keys, dim)

    def __call__(self, x: torch.Tensor, norm: Norm | None, context: Forward, cos: torch.Tensor, sin: torch.Tensor,
                 rows: torch.Tensor | None = None) -> torch.Tensor:
        """x + attention(norm x), of these rows only where some are named; x may be overwritten."""
        kernels, cache, view = context.kernels, context.cache(self.layer), context.view(self.layer)
        if self.joint is None:
            q = kernels.project(x, norm, self.qkv.weight, self.qkv.bias, self.heads, cos, sin, cache, view.slots)
        else:
            qkv = self.joint(self.qkv(kernels.norm(x, norm), kernels), kernels)
            q = kernels.rotate_and_store(qkv, self.heads, cos, sin, cache, view.slots)
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
        return linear.add(onto, x, kernels)
    return onto + kernels.norm(linear(x, kernels).contiguous(), after)


def head_rows(share: HeadShare, dim: int) -> list[Part | None]:
    """A rank's outputs of the matrices of queries, keys and values; None: all of them."""
    if not share.split:
        return [None] * 3
    query, keys = ((first * dim, (first + count) * dim) for first, count in (
        (share.first, share.query), (share.first_keys, share.keys)))
    return [Part(0, (query,)), Part(0, (keys,)), Part(0, (keys,))]


def stacked(parts: Sequence[Part | None], sizes: Sequence[int]) -> Part | None:
    """The same where a file holds those matrices, of so many outputs, as one."""
    ranges: list[tuple[int, int]] = []
    for index, part in enumerate(parts):
        if part is None:
            return None
        first = sum(sizes[:index])
        ranges += [(first + begin, first + end) for begin, end in part.ranges]
    return Part(0, tuple(ranges))


class JointNorms:
    """Norms over all queries, and over all keys, of a layer whose heads lie on several ranks: they are gathered, normed
    whole, and each rank goes on with its own."""

    def __init__(self, query: Norm, keys: Norm, shard: Shard, share: HeadShare, dim: int) -> None:
        self._query = query
        self._keys = keys
        self._shard = shard
        self._share = share
        self._dim = dim

    def __call__(self, qkv: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """[N, (H + 2 H_kv) d] of this rank's heads -> the same, queries and keys normed."""
        share, dim = self._share, self._dim
        queries, keys = share.query * dim, share.keys * dim
        found = self._shard.ranks.gather(qkv[:, :queries + keys].contiguous())
        q = kernels.norm(torch.cat([one[:, :queries] for one in found], dim=-1), self._query)
        k = kernels.norm(torch.cat([one[:, queries:] for one in found[::share.holders]], dim=-1), self._keys)
        return torch.cat((q.narrow(1, share.first * dim, queries), k.narrow(1, share.first_keys * dim, keys),
                          qkv[:, queries + keys:]), dim=-1)


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
        inner, shard = config.intermediate_size, shard_of(weights)
        self.up = load_linear(weights, [f"{prefix}.up_proj"], [inner], config.hidden_size, bias, [shard.rows(inner)])
        self.down = load_return(weights, f"{prefix}.down_proj", config.hidden_size, shard.widths(inner), bias)

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
        shard = shard_of(weights)
        parts, sizes = ([f"{prefix}.gate_up_proj"], [2 * inner]) if fused else ([gate, up], [inner, inner])
        rows = [shard.rows(inner, times=2)] if fused else [shard.rows(inner)] * 2
        self.gate_up = load_linear(weights, parts, sizes, config.hidden_size, bias, rows)
        self.down = load_return(weights, down, config.hidden_size, shard.widths(inner), bias)

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
    which every row goes through where there is one. Of the experts each rank has some."""

    def __init__(self, router: Router, experts: Mapping[int, GatedMLP], shared: GatedMLP | None = None,
                 shard: Shard = WHOLE) -> None:
        """experts: this rank's, by their index."""
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shard = shard

    def __call__(self, x: torch.Tensor, norm: Norm | None, kernels: Kernels,
                 onto: torch.Tensor | None = None) -> torch.Tensor:
        normed = kernels.norm(x, norm)
        weights, ids = self.router(normed, kernels)
        shared = None if self.shared is None else self.shared.alone(normed, kernels).float()
        if self.shard.size == 1:
            out = self._added(normed, weights, ids, kernels, shared)
        elif self.shard.exact:
            out = self._gathered(normed, weights, ids, kernels, shared)
        else:
            out = self.shard.added(self._added(normed, weights, ids, kernels, None))
            out = out if shared is None else shared + out
        return (x if onto is None else onto) + out.to(x.dtype)

    def _added(self, normed: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kernels: Kernels,
               onto: torch.Tensor | None) -> torch.Tensor:
        """One expert after the other, each row at most once in each: every row sums in the same order, with no
        atomics, whoever shares its experts."""
        out = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device) if onto is None else onto
        for rows, _, mixed in self._mixed(normed, weights, ids, kernels):
            out.index_copy_(0, rows, out.index_select(0, rows) + mixed)
        return out

    def _gathered(self, normed: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kernels: Kernels,
                  onto: torch.Tensor | None) -> torch.Tensor:
        """The same sums where other ranks have some of the experts: what each said of a row is brought together, then
        added in order of their index."""
        said = torch.zeros((*ids.shape, normed.shape[-1]), dtype=torch.float32, device=normed.device)
        for rows, place, mixed in self._mixed(normed, weights, ids, kernels):
            said[rows, place] = mixed
        said = self.shard.merged(said)
        out = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device) if onto is None else onto
        every = torch.arange(len(ids), device=ids.device)
        for place in ids.argsort(dim=1).unbind(1):
            out = out + said[every, place]
        return out

    def _mixed(self, normed: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
               kernels: Kernels) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each expert that some rows go to: those rows, its place among the experts of each, and what it adds."""
        for index, expert in self.experts.items():
            rows, place = torch.where(ids == index)
            if len(rows):
                yield rows, place, (expert.alone(normed.index_select(0, rows), kernels)
                                    * weights[rows, place][:, None])


def load_experts(weights: WeightSource, count: int,
                 build: Callable[[WeightSource, int], GatedMLP]) -> dict[int, GatedMLP]:
    """Those of `count` experts that this rank has, each whole, by their index."""
    whole = unshared(weights)
    return {index: build(whole, index) for index in range(*shard_of(weights).span(count, unit=1))}
