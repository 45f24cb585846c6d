"""Heads that were trained: their shapes out of their own configurations, weights being there or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelFormatError
from paceline.models.heads.formats.marks import HYDRA, MEDUSA, SPECULATORS, describes_head, is_eagle3_config
from paceline.plan.drafters import METHODS, Drafter
from paceline.plan.heads import HeadShape, attending
from paceline.plan.known import Found
from paceline.plan.shape import FeedForward, Layer, Mixer, ModelShape

if TYPE_CHECKING:
    from paceline.models.heads.config import HeadConfig


def packaged(name: str) -> Path | None:
    """Where the head of this name lies that comes with Paceline."""
    if "/" not in name:
        return None
    from paceline.models.heads.packaged import PACKAGED_HEADS, packaged_head

    with suppress(OSError, ValueError):  # a name too long for a file, ...
        return None if Path(name).is_dir() else packaged_head(PACKAGED_HEADS, name)
    return None


def config_of(found: Found, target: ModelShape) -> HeadConfig | None:
    """Of a head for this target; None: it is a model. Whether a head brings matrices of its own its weights' names say;
    without them it is taken to be as its kind is published, or trained here. A ModelFormatError says what is wrong with
    it, or that it is another target's."""
    if found.folder is None and not describes_head(found.raw):
        return None  # known models do without torch
    names = _names(found)
    if not describes_head(found.raw) and "fc.weight" not in names:
        return None
    from paceline.models.config import ModelConfig
    from paceline.models.heads.formats.read import read_config

    # A head is read with regard to its target's width, depth and vocabulary, whatever its layers are.
    stand_in = ModelConfig.from_dict({
        "model_type": "llama", "vocab_size": target.vocab, "hidden_size": target.hidden,
        "num_hidden_layers": len(target.layers), "num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1,
        "max_position_embeddings": target.context or 2048})
    return read_config(dict(found.raw), names or _assumed(found.raw), stand_in, str(found.folder or found.name))


def _names(found: Found) -> list[str]:
    """Of its tensors; none: they are not here, or pickled."""
    if found.folder is None or not any(found.folder.glob("*.safetensors")):
        return []
    from paceline.models.load.safetensors_folder import SafetensorsFolder

    with suppress(ModelFormatError), SafetensorsFolder(found.folder) as checkpoint:
        return list(checkpoint.names())
    return []  # not all of it was fetched, and a config is enough


def _assumed(raw: Mapping[str, Any]) -> list[str]:
    """What heads have whose format says little in config.json. (Others say all but whether their output matrix is the
    target's, and it is read all the same.)"""
    from paceline.models.heads.config import MOST_DRAFTED

    for key, start in ((MEDUSA, ""), (HYDRA, "hydra_mlp.")):
        if isinstance(heads := raw.get(key), int):
            return [f"{start}{head}.0.linear.weight" for head in range(min(heads, MOST_DRAFTED + 1))]
    eagle3 = is_eagle3_config(raw) and SPECULATORS not in raw
    return ["fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"] if eagle3 else []


def drafter_of(name: str, config: HeadConfig, target: ModelShape) -> Drafter:
    """With the acceptance that is typical of its kind."""
    usual = METHODS[config.kind](target)
    wish = {"method": config.kind} | ({} if name == config.kind else {"head": name})
    return replace(usual, name=name, shape=head_shape(config, target), most=config.depth or usual.most, wish=wish,
                   source=f"typical of {config.kind}: {usual.source}; of this one --prompts measures it")


def head_shape(config: HeadConfig, target: ModelShape) -> HeadShape:
    """By the tensors that its checkpoint has, each where it is used."""
    from paceline.models.heads.config import BLOCK_KINDS, HEAD_KINDS
    from paceline.models.heads.tensors import MAPS, MTP, expected, lm_heads

    sizes = {name: math.prod(shape) for name, shape in expected(config).items() if name not in MAPS}
    over_words = ("embed_tokens.", *(f"{name}." for name in lm_heads(config.kind, config.heads, config.num_layers)))
    body = {name: size for name, size in sizes.items() if not name.startswith(over_words)}
    shape = HeadShape(
        hidden=config.hidden_size, vocab=config.draft_vocab_size, passes=(), body=sum(body.values()),
        matrices=sum(sizes.values()) - sum(body.values()),
        copied=config.draft_vocab_size * config.hidden_size if config.reduced and not config.own_lm_head else 0)
    if config.kind in HEAD_KINDS:
        start = "hydra_mlp." if config.kind == "hydra" else ""
        networks = (tuple(Layer((), FeedForward(_under(body, f"{start}{head}.{layer}.")))
                          for layer in range(config.num_layers)) for head in range(config.heads))
        return replace(shape, passes=tuple(networks), kept=config.hidden_size,
                       at_once=config.kind == "medusa" and not config.own_lm_head)
    prefixes = [MTP] if config.kind == "mtp" else [f"layers.{layer}" for layer in range(config.num_layers)]
    layers = tuple(_layer(config, body, prefix) for prefix in prefixes)
    keys = sum(size for name, size in body.items() if any(part in name for part in (".k_proj.", ".v_proj.")))
    if config.target_layer:
        layers = (attending(target),)
        keys = config.hidden_size * sum(mixer.cached for mixer in layers[0].mixers)
        shape = replace(shape, body=shape.body + layers[0].parameters)
    kept = sum(mixer.cached for layer in layers for mixer in layer.mixers)
    fused = _under(body, "fc.", "hidden_norm.", "input_norm.", f"{MTP}.input_proj.")
    if config.kind in BLOCK_KINDS:
        following = _under(body, "markov_head.", "confidence_head.") - _under(body, "markov_head.markov_w1.")
        return replace(shape, passes=(layers,), rows=config.block_size, taken=fused + keys, following=following,
                       entry=_under(body, "norm."), at_once=True, kept=kept)
    # EAGLE-3 makes features of the target's streams; the others bring token and feature together in every pass.
    entry = _under(body, "norm.") if config.kind == "eagle3" else fused
    return replace(shape, passes=(layers,), taken=fused + keys, entry=entry, kept=kept + config.hidden_size)


def _layer(config: HeadConfig, body: Mapping[str, int], prefix: str) -> Layer:
    cached, query = 2 * config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
    attention, feed_forward = _under(body, f"{prefix}.self_attn."), _under(body, f"{prefix}.mlp.")
    mixer = Mixer(attention, "gqa", cached, cached, 2 * config.num_kv_heads, config.num_heads, config.num_kv_heads,
                  config.window, 4 * query)
    projection = _under(body, f"{prefix}.input_proj.")
    return Layer((mixer,), FeedForward(feed_forward),
                 _under(body, f"{prefix}.") - attention - feed_forward - projection)


def _under(sizes: Mapping[str, int], *prefixes: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(prefixes))


