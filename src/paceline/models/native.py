"""A decoder whose layers run in native code: weights in 4 or 8 bits, activations in int8 with a scale per 32 values.

For models of Llama's shape (Llama, Mistral, Qwen2, Qwen3, dense). Exact by construction: integer sums, and floats in
an order that depends on neither rows nor threads, so it is deterministic always.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.kernels import cpu
from paceline.kernels.cpu.backend import StepArrays, attention_runs
from paceline.kernels.interface import Kernels
from paceline.kernels.operands import Norm
from paceline.models.config import ModelConfig
from paceline.models.decoder import ROPE_FACTORS, cache_groups
from paceline.models.forward import Forward
from paceline.models.interface import ModelTraits
from paceline.models.layers import Linear
from paceline.models.packing import PackingWeights
from paceline.models.rope import Rope
from paceline.models.weight_source import WeightSource

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NOTHING = np.zeros(0, dtype=np.float32)
CACHES = (torch.float32, torch.float16, torch.int8)


def unsupported(config: ModelConfig) -> str | None:
    """Why the native decoder cannot run a model of this shape; None: it can."""
    if config.model_type not in FAMILIES or config.num_experts:
        return f"the architecture {config.model_type} runs in torch"
    usual = (config.activation, config.attention_scale) == ("silu", config.head_dim ** -0.5)
    if not usual or config.score_cap or config.logit_cap or config.local_rope is not None:
        return "activations, scales, caps and rotations other than Llama's run in torch"
    if any(config.kv_source(layer) != layer for layer in range(config.num_layers)):
        return "layers that read the keys of others run in torch"
    if config.mlp_bias or (config.attention_bias and config.model_type != "qwen2"):
        return "biases on output projections run in torch"
    if config.rope.rotary_dim != config.head_dim or config.head_dim % 16:
        return f"a head of {config.head_dim} with {config.rope.rotary_dim} rotary features runs in torch"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if any(width % 32 for width in widths) or config.num_kv_heads * config.head_dim % 8:
        return f"widths {widths} are not multiples of 32"
    if not attention_runs(config.head_dim, config.num_heads, config.num_kv_heads):
        return "more than 16 query heads share a key head, or a head has more than 256 features"
    return None


class NativeDecoder(ModelTraits):
    """CausalLM over the native library. Weights are packed as PackingWeights says."""

    self_contained = True
    skips_sublayers = False

    def __init__(self, config: ModelConfig, weights: WeightSource, max_model_len: int, *, threads: int,
                 kv_dtype: torch.dtype = torch.float32, kernels: str = "", keep_blocks: bool = False) -> None:
        reason = unsupported(config)
        if reason is not None:
            raise ConfigError(f"kernels='native' cannot run this model: {reason}; use kernels='auto'.")
        if kv_dtype not in CACHES:
            raise ConfigError(f"The native decoder's cache is int8, float16 or float32, not {kv_dtype}: choose one of "
                              "those as kv_dtype, or kernels='auto'.")
        self._native = cpu.require()
        self.config = config
        self.kv_dtype = kv_dtype
        self.cache_groups = cache_groups(config)
        packer = PackingWeights(weights, keep_blocks)
        hidden, d = config.hidden_size, config.head_dim
        # The largest matrix first: file and copy are in memory together only while nothing else is.
        self._embedding = packer.matrix([("model.embed_tokens.weight", config.vocab_size)], hidden)
        self._head = self._embedding
        packer.let_go()
        if not config.tie_word_embeddings:
            self._head = packer.matrix([("lm_head.weight", config.vocab_size)], hidden)
            packer.let_go()
        self._norm = packer.vector("model.norm.weight", hidden)
        self.head = Linear(self._head)
        self.norm = Norm(torch.from_numpy(self._norm), config.norm_eps)
        """Head and final norm as draft heads borrow them."""
        factors = weights.take(ROPE_FACTORS, (d // 2,)) if config.rope.kind == "factors" else None
        cos, sin = Rope(config, max_model_len, torch.device("cpu"), factors).halves()
        self._model = self._native.Model(
            hidden=hidden, heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=d,
            intermediate=config.intermediate_size, eps=config.norm_eps, cache=str(kv_dtype).removeprefix("torch."),
            kernels=kernels, threads=threads, cos=cos.numpy(), sin=sin.numpy())
        group_of = {layer: index for index, group in enumerate(self.cache_groups) for layer in group.layers}
        for layer in range(config.num_layers):
            self._add_layer(packer, layer, group_of[layer])
            packer.let_go()
        self.bits, self.quantization, self.built_for = packer.bits, packer.quantization, max_model_len
        self._windows = [group.window or 0 for group in self.cache_groups]
        self._bound: Any = None
        self.instruction_set: str = self._model.kernels

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.rows(token_ids)

    def layers(self, hidden: torch.Tensor, context: Forward, first: int = 0, last: int | None = None) -> torch.Tensor:
        end = self.config.num_layers if last is None else last
        out = hidden.clone()
        skipped = _whole_layers(context.skip)
        # One native call runs a range of layers: cut around what is skipped.
        stops = {edge for layer in skipped for edge in (layer, layer + 1) if first < edge < end}
        at = first
        for stop in [*sorted(stops), end]:
            # A range that ends where another begins leaves the tap there to that one.
            taps = [tap for tap in context.taps
                    if at <= tap < stop or (tap == stop == end == self.config.num_layers)]
            if at in skipped or at == stop:
                context.tapped.update((tap, out.clone()) for tap in taps)
            else:
                self._run(out, context, at, stop, taps)
            at = stop
        return out

    @property
    def capturable(self) -> bool:
        return False

    def linears(self) -> list[Linear]:
        raise ConfigError("This model runs whole in native code, which knows no adapters: name them when the engine is "
                          "made, or say adapters={} then to load some later.")

    def logits(self, hidden: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        out = np.empty((hidden.shape[0], self._head.matrix.rows), dtype=np.float32)
        self._model.head(self._head.matrix, self._norm, hidden.contiguous().numpy(), out)
        return torch.from_numpy(out)[:, :self.config.vocab_size]

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        hidden = self.embed(token_ids)
        if context.skip:
            return self.layers(hidden, context)
        self._run(hidden, context, 0, self.config.num_layers, list(context.taps))
        return hidden

    def _run(self, hidden: torch.Tensor, context: Forward, first: int, last: int, taps: list[int]) -> None:
        if self._bound is not context.keys:
            planes = (context.keys, context.values, context.key_scales, context.value_scales)
            self._model.bind_cache(*([plane[i] for i in range(self.config.num_layers)] if plane else []
                                     for plane in planes))
            self._bound = context.keys
        layout = context.layout
        step = StepArrays.of(layout)
        for tap in taps:
            context.tapped[tap] = torch.empty_like(hidden)
        self._model.run(
            hidden.numpy(), step.positions, step.offsets, step.starts, step.parents, layout.block_size,
            [np.ascontiguousarray(view.tables.numpy()) for view in layout.views],
            [view.slots.numpy() for view in layout.views], self._windows, first, last, False, taps,
            [context.tapped[tap].numpy() for tap in taps])

    def _add_layer(self, packer: PackingWeights, layer: int, group: int) -> None:
        config, name = self.config, f"model.layers.{layer}."
        d, wide = config.head_dim, config.intermediate_size
        q, kv = config.num_heads * d, config.num_kv_heads * d
        attention, mlp = name + "self_attn.", name + "mlp."
        heads = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        bias = NOTHING
        if config.model_type == "qwen2":
            bias = np.concatenate([packer.vector(f"{attention}{part}.bias", rows) for part, rows in heads])
        normed = config.model_type == "qwen3"
        self._model.add_layer(
            packer.vector(name + "input_layernorm.weight", config.hidden_size),
            packer.vector(name + "post_attention_layernorm.weight", config.hidden_size),
            packer.matrix([(f"{attention}{part}.weight", rows) for part, rows in heads], config.hidden_size).matrix,
            packer.matrix([(attention + "o_proj.weight", config.hidden_size)], q).matrix,
            packer.matrix([(f"{mlp}{part}_proj.weight", wide) for part in ("gate", "up")], config.hidden_size).matrix,
            packer.matrix([(mlp + "down_proj.weight", config.hidden_size)], wide).matrix,
            group, bias, packer.vector(attention + "q_norm.weight", d) if normed else NOTHING,
            packer.vector(attention + "k_norm.weight", d) if normed else NOTHING)


def _whole_layers(skip: frozenset[tuple[int, str]]) -> frozenset[int]:
    """The layers of which both sublayers are skipped; native code knows no other kind."""
    layers = frozenset(layer for layer, part in skip if part == "attn")
    if layers != frozenset(layer for layer, part in skip if part == "mlp"):
        raise ConfigError("The native decoder skips whole layers only: name both 'attn' and 'mlp' of each.")
    return layers
