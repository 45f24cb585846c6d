"""A ModelShape from a config.json, of more families than the engine runs: a plan needs sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.fields import MOST_EXPERTS, MOST_LAYERS, MOST_POSITIONS, Fields, shown
from paceline.models.spelling import spelled
from paceline.plan.recurrent import gated_delta, mamba, short_convolution
from paceline.plan.shape import BITS, FeedForward, Layer, Mixer, ModelShape

_PLAIN_FEED_FORWARD = frozenset({"gpt2", "gpt_neox", "nemotron_h"})
"""Two matrices instead of three."""
_LAYER_NORMS = frozenset({"gpt2", "gpt_neox"})
"""Norms with a bias."""
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "lfm2"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
_WINDOWED = frozenset({"mistral", "mixtral", "phi3"})
_LISTED = {"full_attention": "attention", "sliding_attention": "sliding", "chunked_attention": "attention",
           "linear_attention": "gated_delta", "attention": "attention", "conv": "short_convolution", "mamba": "mamba",
           "hybrid": "attention+mamba", "mlp": "", "moe": ""}
"""What layer_types calls a layer's mixers."""
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_shape(raw: Mapping[str, Any], name: str = "the model") -> ModelShape:
    """A ModelFormatError names the key that is missing or makes no sense."""
    inner = raw.get("text_config")
    if isinstance(inner, Mapping) and raw.get("model_type") != "gemma3":
        raw = {"model_type": raw.get("model_type"), **raw, **inner}
    raw = spelled(raw)
    read = _Shape(raw, f"config.json of {name}")
    kinds = _kinds(read)
    sources = _sources(read, kinds)
    layers = tuple(Layer(_mixers(read, kind, own=sources[place] == place), _feed_forward(read, place, kind),
                         _norms(read, kind)) for place, kind in enumerate(kinds))
    positions = read.count("max_position_embeddings", 0, most=MOST_POSITIONS)
    learned = positions * read.hidden if raw.get("position_embedding_type") == "learned" else 0
    return ModelShape(name=name, hidden=read.hidden, vocab=read.count("vocab_size"), layers=layers,
                      tied=read.flag("tie_word_embeddings", read.family in ("gemma", "lfm2", "mamba2")),
                      context=positions or None, dtype=_dtype(read), model_type=read.family,
                      further=learned + read.norm)


class _Shape(Fields):
    """The sizes that everything else is made from."""

    needed_by = "the plan"

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw, where)
        self.family = self.text("model_type", "llama")
        self.hidden = self.count("hidden_size")

    @property
    def norm(self) -> int:
        return self.hidden * (2 if self.family in _LAYER_NORMS else 1)


def _kinds(read: _Shape) -> list[str]:
    """Of each layer, its mixers; "sliding" is attention within a window."""
    pattern = read.text("hybrid_override_pattern", "")
    layers = read.count("num_hidden_layers", len(pattern) or None, most=MOST_LAYERS)
    types = read.texts("layer_types") or (tuple(_PATTERN.get(letter, letter) for letter in pattern) or None)
    if types is not None:
        unknown = sorted(set(types) - _LISTED.keys())
        if len(types) != layers or unknown:
            raise ModelFormatError(f"{read.named('layer_types')} must list all {layers} layers by names out of "
                                   f"{', '.join(_LISTED)}, got {shown(types)}.")
        return [kind if kind in ("mlp", "moe") else _LISTED[kind] for kind in types]
    whole = {"mamba2": "mamba", "falcon_h1": "attention+mamba"}.get(read.family)
    if whole is not None:
        return [whole] * layers
    if (attending := read.counts("full_attn_idxs")) is not None:
        return ["attention" if layer in attending else "short_convolution" for layer in range(layers)]
    if (every := read.count("full_attention_interval", 4 if read.family == "qwen3_next" else 0)) > 0:
        return ["gated_delta" if (layer + 1) % every else "attention" for layer in range(layers)]
    return ["sliding" if inside else "attention" for inside in _windowed(read, layers)]


def _windowed(read: _Shape, layers: int) -> list[bool]:
    """As models/config.py has it for the families that run (a test compares them)."""
    if read.get("sliding_window") is None:
        return [False] * layers
    if (pattern := read.count("sliding_window_pattern", 0)) > 0:
        return [(layer + 1) % pattern > 0 for layer in range(layers)]
    if read.family in ("qwen2", "qwen3", "qwen3_moe"):
        first = 0 if read.family == "qwen3_moe" else read.count("max_window_layers", layers)
        return [read.flag("use_sliding_window") and layer >= first for layer in range(layers)]
    return [read.family in _WINDOWED] * layers


def _sources(read: _Shape, kinds: list[str]) -> list[int]:
    """Of each layer the one whose cache it reads: the last num_kv_shared_layers have none of their own."""
    own = len(kinds) - read.count("num_kv_shared_layers", 0)
    if own < 1:
        raise ModelFormatError(f"{read.named('num_kv_shared_layers')} must leave one of the {len(kinds)} layers keys "
                               "of its own.")
    return [layer if layer < own else next((source for source in reversed(range(own)) if kinds[source] == kind), layer)
            for layer, kind in enumerate(kinds)]


def _mixers(read: _Shape, kind: str, own: bool) -> tuple[Mixer, ...]:
    parts = [part for part in kind.split("+") if part not in ("mlp", "moe", "")]
    recurrent = {"gated_delta": gated_delta, "mamba": mamba, "short_convolution": short_convolution}
    return tuple(recurrent[part](read, read.hidden) if part in recurrent else
                 _latent(read) if read.get("kv_lora_rank") is not None else
                 _attention(read, read.count("sliding_window") if part == "sliding" else None, own) for part in parts)


def _attention(read: _Shape, window: int | None, own: bool) -> Mixer:
    heads = read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFormatError(f"{read.named('num_attention_heads')} ({heads}) must be a multiple of "
                               f"num_key_value_heads ({kv_heads}).")
    size = read.count("head_dim", max(1, read.hidden // heads))
    query, key = heads * size, kv_heads * size
    gate = query if read.family == "qwen3_next" else 0
    parameters = read.hidden * (query + gate + (2 * key if own else 0)) + query * read.hidden
    if read.flag("attention_bias") or read.family == "qwen2":
        parameters += query + (2 * key if own else 0) + (read.hidden if read.family != "qwen2" else 0)
    parameters += (1 + own) * size if read.family in _HEAD_NORMS else 0
    parameters += query + key * own if read.family == "olmo2" else 0
    parameters += heads if read.family == "gpt_oss" else 0  # sinks
    kind = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    return Mixer(parameters, kind, 2 * key if own else 0, 2 * key, 2 * kv_heads, heads, kv_heads, window, 4 * query)


def _latent(read: _Shape) -> Mixer:
    """Of a token one latent and one rotated key are cached, whatever the number of heads."""
    heads, rank, rope = (read.count(key) for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    nope, value = read.count("qk_nope_head_dim"), read.count("v_head_dim")
    query = heads * (nope + rope)
    lora = read.count("q_lora_rank", 0)
    parameters = ((read.hidden * lora + lora + lora * query if lora else read.hidden * query)
                  + read.hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * read.hidden)
    return Mixer(parameters, "mla", rank + rope, rank + rope, 1, heads, 1, None, 2 * heads * (2 * rank + rope))


def _norms(read: _Shape, kind: str) -> int:
    """Of a layer with two parts two, one before each; Gemma has one behind each as well."""
    if read.family in _FOUR_NORMS:
        return 4 * read.hidden
    single = read.family in ("nemotron_h", "mamba2")
    return read.norm * (1 if single else 2)


def _feed_forward(read: _Shape, place: int, kind: str) -> FeedForward:
    if read.family == "mamba2" or (read.family == "nemotron_h" and kind not in ("mlp", "moe")):
        return FeedForward()
    hidden = read.hidden
    matrices = 2 if read.family in _PLAIN_FEED_FORWARD else 3
    experts, chosen = _experts(read)
    if not experts or _is_dense(read, place):
        width = _width(read)
        biases = width + hidden if read.flag("mlp_bias") else 0
        return FeedForward(matrices * hidden * width + biases)
    inner = read.count("moe_intermediate_size", read.count("intermediate_size"))
    shared = read.count("shared_expert_intermediate_size", 0) or read.count("shared_intermediate_size", 0) or (
        inner * read.count("n_shared_experts", 0, most=MOST_EXPERTS))
    gate = hidden if read.get("shared_expert_intermediate_size") else 0
    correction = experts if read.get("topk_method") == "noaux_tc" else 0
    biased = read.family == "gpt_oss"
    router = hidden * experts + (experts if biased else 0) + correction
    return FeedForward(router + matrices * hidden * shared + gate, experts, chosen,
                       matrices * hidden * inner + (2 * inner + hidden if biased else 0))


def _experts(read: _Shape) -> tuple[int, int]:
    key = next((key for key in ("num_local_experts", "n_routed_experts", "num_experts") if read.get(key)), None)
    if key is None:
        return 0, 0
    experts, chosen = read.count(key, most=MOST_EXPERTS), read.count("num_experts_per_tok")
    if chosen > experts:
        raise ModelFormatError(f"{read.named('num_experts_per_tok')} ({chosen}) must not exceed {key} ({experts}).")
    return experts, chosen


def _is_dense(read: _Shape, place: int) -> bool:
    """Whether this layer of a mixture has one feed-forward instead."""
    if read.get("n_routed_experts"):
        return place < read.count("first_k_dense_replace", 0) or place % read.count("moe_layer_freq", 1) > 0
    named = read.counts("mlp_only_layers") or ()
    return place in named or (place + 1) % read.count("decoder_sparse_step", 1) > 0


def _width(read: _Shape) -> int:
    """LFM2 names a width of which two thirds are meant, rounded up."""
    width = read.count("intermediate_size", read.get("shared_intermediate_size"))
    if not read.flag("block_auto_adjust_ff_dim"):
        return width
    multiple = read.count("block_multiple_of", 256)
    return multiple * math.ceil(int(read.positive("block_ffn_dim_multiplier", 1.0) * (2 * width // 3)) / multiple)


def _dtype(read: _Shape) -> str:
    """Of the weights as they are stored."""
    quantised = Fields(read.mapping("quantization_config"), read.named("quantization_config"))
    method = quantised.text("quant_method", "")
    if method in ("fp8", "mxfp4"):
        return method
    if method == "compressed-tensors" and "float" in str(quantised.get("format", "")):
        return "fp8"
    if method:
        return "int8" if quantised.count("bits", 4) == 8 or "int" in str(quantised.get("format", "")) else "int4"
    named = read.text("dtype", read.text("torch_dtype", "bfloat16"))
    return named if named in BITS else "bfloat16"
