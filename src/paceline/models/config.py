"""ModelConfig: the fields of a config.json that the architectures use, checked and resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.deepseek_config import ExpertLayers, LatentConfig, expert_layers, latent_config
from paceline.models.fields import MOST_EXPERTS, MOST_LAYERS, MOST_POSITIONS, Fields, shown
from paceline.models.spelling import spelled


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: kind is default, linear, dynamic, llama3, yarn, longrope or factors, or none where nothing
    turns (rotary_dim 0); `settings` are the kind's own."""

    theta: float
    rotary_dim: int
    kind: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model. Sizes in elements, positions in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    """Sliding window of each layer, None for full attention."""
    attention_bias: bool
    mlp_bias: bool
    activation: str
    """Of the feed-forward, one of kernels.interface.ACTIVATIONS."""
    attention_scale: float
    """What the products of queries and keys are multiplied by."""
    score_cap: float = 0.0
    """Attention scores become score_cap * tanh(score / score_cap); 0: as they are."""
    logit_cap: float = 0.0
    """The same of the logits."""
    local_rope: RopeConfig | None = None
    """Of the layers with a window, where it is another than `rope`."""
    learned_positions: bool = False
    """Positions are vectors of their own, added to the embedding."""
    parallel_residual: bool = False
    """Attention and feed-forward of a layer read the same stream, not one after the other."""
    norm_offset: float = 0.0
    """What is added to the weights of norms as they are stored."""
    num_experts: int = 0
    """Experts of a mixture; 0: dense."""
    experts_per_token: int = 0
    expert_size: int = 0
    """intermediate_size of an expert."""
    renormalise_experts: bool = True
    """Weights of the chosen experts are a softmax over them alone, not over all."""
    dense_layers: frozenset[int] = frozenset()
    """Layers of a mixture that have one feed-forward instead."""
    latent: LatentConfig | None = None
    """Latent attention: kv_heads is 1 then, and head_dim what is cached of a token."""
    expert_layers: ExpertLayers | None = None
    """Mixtures in some of the layers, with experts that all rows share."""
    kv_sources: tuple[int, ...] = ()
    """Of each layer the one whose keys and values it reads: itself, or an earlier layer. (): each its own."""

    def kv_source(self, layer: int) -> int:
        """A layer beyond those counted (MTP) has its own."""
        return self.kv_sources[layer] if layer < len(self.kv_sources) else layer

    @property
    def context(self) -> int:
        """Tokens of a text where nobody asks for more. Of "longrope" what its list for short texts serves: the other
        one is worse at them."""
        original = self.rope.settings.get("original_max_position_embeddings") if self.rope.kind == "longrope" else None
        longest = self.max_position_embeddings
        return min(original, longest) if isinstance(original, int) and original > 0 else longest

    def below(self, length: int) -> ModelConfig:
        """The same for texts of at most `length` tokens: a window that hides nothing in those is none, and costs
        nothing. Where windows also decide how a layer rotates they stay."""
        if self.local_rope is not None:
            return self
        return replace(self, windows=tuple(window if window is not None and window < length else None
                                           for window in self.windows))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config.json; a ModelFormatError says which key is missing or contradicts another."""
        raw = spelled(raw)
        read = Fields(raw, "config.json")
        model_type = read.text("model_type")
        activation = read.text("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise ModelFormatError(f"config.json: hidden_act {activation!r} is not supported; supported are "
                                   f"{', '.join(_ACTIVATIONS)}.")
        for key, usual in _SWITCHES.items():
            if raw.get(key) is not None and raw[key] != usual:
                raise ModelFormatError(f"config.json: {key} = {raw[key]!r} is not supported; only {usual} is.")
        layers = read.count("num_hidden_layers", most=MOST_LAYERS)
        heads = read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", heads)
        hidden = read.count("hidden_size")
        if heads % kv_heads:
            raise ModelFormatError(
                f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads}).")
        head_dim = read.count("head_dim", hidden // heads)
        experts = read.count("num_local_experts", 0, most=MOST_EXPERTS)
        chosen = read.count("num_experts_per_tok", 0) if experts else 0
        if experts and not 1 <= chosen <= experts:
            raise ModelFormatError(
                f"config.json: num_experts_per_tok ({chosen}) must lie between 1 and num_local_experts ({experts}).")
        latent, mixtures = latent_config(read), expert_layers(read)
        if latent is not None:
            kv_heads, head_dim = 1, latent.width
        if mixtures is not None:
            experts, chosen = mixtures.count, mixtures.rule.chosen
        positions = read.count("max_position_embeddings", most=MOST_POSITIONS)
        learned = raw.get("position_embedding_type") == "learned"
        rope, local_rope = (RopeConfig(1.0, 0, "none"), None) if learned else _ropes(
            raw, head_dim if latent is None else latent.rope_dim)
        windows = _windows(read, model_type, layers)
        return cls(
            model_type=model_type,
            vocab_size=read.count("vocab_size"),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=read.count("intermediate_size"),
            norm_eps=read.positive("rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=positions,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            windows=windows,
            attention_bias=read.flag("attention_bias"),
            mlp_bias=read.flag("mlp_bias"),
            activation=_ACTIVATIONS[activation],
            attention_scale=read.positive("query_pre_attn_scalar", head_dim) ** -0.5,
            score_cap=read.positive("attn_logit_softcapping", 0.0),
            logit_cap=read.positive("final_logit_softcapping", 0.0),
            local_rope=local_rope,
            learned_positions=learned,
            parallel_residual=read.flag("use_parallel_residual"),
            norm_offset=read.number("norm_offset", 0.0),
            num_experts=experts,
            experts_per_token=chosen,
            expert_size=read.count("moe_intermediate_size", read.count("intermediate_size")) if experts else 0,
            renormalise_experts=read.flag("norm_topk_prob", model_type == "mixtral"),
            dense_layers=_dense_layers(read, layers) if experts else frozenset(),
            latent=latent,
            expert_layers=mixtures,
            kv_sources=_kv_sources(read, windows),
        )


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh"}
_SWITCHES = {"use_bidirectional_attention": False, "scale_attn_weights": True, "add_cross_attention": False,
             "scale_attn_by_inverse_layer_idx": False}
"""What would make another model of one that is supported."""
_WINDOWED = ("mistral", "mixtral", "phi3")
"""Have a window in every layer where the config names one."""


def _windows(read: Fields, model_type: str, layers: int) -> tuple[int | None, ...]:
    window = read.get("sliding_window")
    types = read.texts("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ModelFormatError(f"config.json: layer_types must list all {layers} layers, got {shown(types)}.")
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelFormatError(f"config.json: layer_types names {sorted(unknown)}; only full_attention and "
                                   "sliding_attention are supported.")
        if "sliding_attention" in types and window is None:
            raise ModelFormatError("config.json: layer_types has sliding_attention but sliding_window is missing.")
        windowed = [kind == "sliding_attention" for kind in types]
    elif (pattern := read.count("sliding_window_pattern", 0)) > 0:
        # The last of so many layers sees everything.
        windowed = [(layer + 1) % pattern > 0 for layer in range(layers)]
    elif model_type == "qwen3_moe":
        windowed = [read.flag("use_sliding_window")] * layers
    elif model_type in ("qwen2", "qwen3"):
        # These name a window but use it only when told to, and only in the layers from max_window_layers on.
        first = read.count("max_window_layers", layers) if read.flag("use_sliding_window") else layers
        windowed = [layer >= first for layer in range(layers)]
    else:
        windowed = [model_type in _WINDOWED] * layers
    if not any(windowed) or window is None:
        return (None,) * layers
    size = read.count("sliding_window")
    return tuple(size if inside else None for inside in windowed)


def _kv_sources(read: Fields, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """The last num_kv_shared_layers layers read the keys and values of the last layer before them that has their
    window."""
    own = len(windows) - read.count("num_kv_shared_layers", 0)
    if own < 1:
        raise ModelFormatError(f"config.json: num_kv_shared_layers must leave one of the {len(windows)} layers keys of "
                               "its own.")
    sources = list(range(own))
    for layer in range(own, len(windows)):
        found = next((source for source in reversed(range(own)) if windows[source] == windows[layer]), None)
        if found is None:
            raise ModelFormatError(f"config.json: layer {layer} shares keys (num_kv_shared_layers), and no layer "
                                   f"before {own} has its window.")
        sources.append(found)
    return tuple(sources)


def _dense_layers(read: Fields, layers: int) -> frozenset[int]:
    """Those named, and those between the ones at every `decoder_sparse_step`."""
    named = {*(read.counts("mlp_only_layers") or ())}
    step = read.count("decoder_sparse_step", 1)
    return frozenset(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def _ropes(raw: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Of layers that see everything, and of those with a window where theirs is another. Both spellings: one of each
    under rope_parameters, or a theta of its own for the windowed ones, which are then not scaled."""
    parts, theta = raw.get("rope_parameters"), raw.get("rope_local_base_freq")
    if isinstance(parts, Mapping) and any(isinstance(value, Mapping) for value in parts.values()):
        unknown = set(parts) - {"full_attention", "sliding_attention"}
        if unknown or "full_attention" not in parts:
            raise ModelFormatError(f"config.json: rope_parameters differs by layer type and names {sorted(parts)}; "
                                   "full_attention, and sliding_attention beside it, are supported.")
        bare = {key: value for key, value in raw.items() if key != "rope_scaling"}
        near = parts.get("sliding_attention") or (
            parts["full_attention"] if theta is None else {"rope_theta": theta})
        full, local = (_rope({**bare, "rope_parameters": part, "rope_theta": fallback}, head_dim)
                       for part, fallback in ((parts["full_attention"], raw.get("rope_theta")), (near, theta)))
        return full, local if local != full else None
    local = _rope({**raw, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}, head_dim)
    return _rope(raw, head_dim), local if theta is not None else None


def _first(*values: Any) -> Any:
    """The first that says something; 0 does."""
    return next(value for value in values if value is not None)


def _rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Both spellings: rope_theta + rope_scaling, and rope_parameters that holds everything."""
    read = Fields(raw, "config.json")
    settings: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise read.wrong(key, "an object", part)
        settings.update(part)
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if not isinstance(kind, str):
        raise read.wrong("rope_type", "a text", kind)
    if kind == "su":
        kind = "longrope"  # what Phi-3 called it first
    if kind == "longrope" and raw.get("original_max_position_embeddings") is not None:
        settings.setdefault("original_max_position_embeddings", raw["original_max_position_embeddings"])
    theta, partial = (
        Fields({key: _first(settings.pop(key, None), raw.get(key), usual)}, "config.json").positive(key)
        for key, usual in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)))
    rotary = int(head_dim * min(partial, 2.0))
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ModelFormatError(f"config.json: rotary embeddings need an even number of features up to head_dim "
                               f"({head_dim}), got {rotary}.")
    return RopeConfig(theta, rotary, kind, settings)
