"""Which tensors a head's checkpoint holds, under the names of the speculators format, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import ModelFormatError
from paceline.models.heads.config import BLOCK_KINDS, HeadConfig

Shapes = dict[str, tuple[int, ...]]
MAPS = ("d2t", "t2d")
"""Between the vocabularies: d2t [draft vocabulary] integers, t2d [vocabulary] booleans, which say the same."""
MTP = "mtp_layers.0"
MARKOV_W2 = "markov_head.markov_w2.weight"


def expected(config: HeadConfig) -> Shapes:
    """Every tensor of such a head but t2d, which says nothing that d2t does not, and those of a layer that the target's
    architecture builds."""
    shapes: Shapes
    if config.kind in BLOCK_KINDS:
        shapes = _block(config)
    elif config.kind == "eagle3":
        shapes = _eagle3(config)
    elif config.kind == "eagle1":
        shapes = {"fc.weight": (config.hidden_size, 2 * config.hidden_size), **_layer(config, "layers.0")}
        if config.fc_bias:
            shapes["fc.bias"] = (config.hidden_size,)
    elif config.kind == "mtp":
        shapes = _mtp(config)
    elif config.kind == "medusa":
        shapes = _medusa(config)
    else:
        shapes = _hydra(config)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    if config.own_lm_head:
        matrix = (config.draft_vocab_size, config.hidden_size)
        shapes |= {f"{name}.weight": matrix for name in lm_heads(config.kind, config.heads, config.num_layers)}
        if config.kind == "hydra":
            shapes |= {f"{name}.bias": matrix[:1] for name in lm_heads(config.kind, config.heads, config.num_layers)}
    if config.reduced:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def lm_heads(kind: str, heads: int, layers: int) -> list[str]:
    """Of a head that brings its own matrices over the draft vocabulary."""
    if kind == "medusa":
        return [f"{head}.{layers}" for head in range(heads)]
    return [f"hydra_lm_head.{head}" for head in range(heads)] if kind == "hydra" else ["lm_head"]


def _layer(config: HeadConfig, prefix: str, inputs: int = 1) -> Shapes:
    """A decoder layer without its first norm; the projections of queries, keys and values read `inputs` streams."""
    hidden, dim = config.hidden_size, config.head_dim
    sizes = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    attention = f"{prefix}.self_attn"
    shapes: Shapes = {f"{attention}.{part}_proj.weight": (size, inputs * hidden) for part, size in sizes.items()}
    if config.attention_bias:
        shapes |= {f"{attention}.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if config.qk_norm:
        shapes |= {f"{attention}.{part}_norm.weight": (dim,) for part in "qk"}
    shapes[f"{attention}.o_proj.weight"] = (hidden, sizes["q"])
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes |= {f"{prefix}.mlp.{part}_proj.weight": (config.intermediate_size, hidden) for part in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, config.intermediate_size)
    return shapes


def _block(config: HeadConfig) -> Shapes:
    hidden, rank = config.hidden_size, config.markov_rank
    shapes: Shapes = {"fc.weight": (hidden, len(config.taps) * hidden), "hidden_norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.input_layernorm.weight": (hidden,), **_layer(config, f"layers.{layer}")}
    shapes["norm.weight"] = (hidden,)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (config.vocab_size, rank),
                   MARKOV_W2: (config.draft_vocab_size, rank)}
        if config.markov_head_type == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if config.markov_head_type == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                       "markov_head.joint_proj.bias": (3 * rank,)}
    if config.confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _eagle3(config: HeadConfig) -> Shapes:
    hidden, taps = config.hidden_size, len(config.taps)
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * hidden,)
    return shapes | {"layers.0.hidden_norm.weight": (hidden,), "layers.0.input_layernorm.weight": (hidden,),
                     **_layer(config, "layers.0", 2), "norm.weight": (hidden,)}


def _mtp(config: HeadConfig) -> Shapes:
    hidden = config.hidden_size
    norms = ["token_layernorm", "hidden_layernorm", "final_layernorm"]
    if not config.target_layer:
        norms.append("input_layernorm")
    shapes: Shapes = {f"{MTP}.input_proj.weight": (hidden, 2 * hidden)}
    shapes |= {f"{MTP}.{norm}.weight": (hidden,) for norm in norms}
    return shapes if config.target_layer else shapes | _layer(config, MTP)


def _medusa(config: HeadConfig) -> Shapes:
    hidden, shapes = config.hidden_size, Shapes()
    for head in range(config.heads):
        for layer in range(config.num_layers):
            shapes |= {f"{head}.{layer}.linear.weight": (hidden, hidden), f"{head}.{layer}.linear.bias": (hidden,)}
    return shapes


def _hydra(config: HeadConfig) -> Shapes:
    hidden, shapes = config.hidden_size, Shapes()
    for head in range(config.heads):
        for layer in range(config.num_layers):
            inputs, name = hidden if layer else (2 + head) * hidden, f"hydra_mlp.{head}.{layer}"
            for part in ("linear",) if layer else ("linear", "res_connection"):
                shapes |= {f"{name}.{part}.weight": (hidden, inputs), f"{name}.{part}.bias": (hidden,)}
    return shapes


def check(config: HeadConfig, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises a ModelFormatError unless these are just the tensors of such a head, and the maps between vocabularies
    make sense."""
    shapes = expected(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ModelFormatError(f"{where} lacks {_some(missing)}, which a {config.kind} head as its config describes it "
                               "has: the download is incomplete, or config and weights do not belong together.")
    own = {name for name in tensors if config.target_layer and name.startswith(f"{MTP}.")}
    check_nothing_left(tensors, {*shapes, *own}, where)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelFormatError(f"tensor '{name}' in {where} has shape {list(tensors[name].shape)}, but the config "
                                   f"asks for {list(shape)}: config and weights do not belong together.")
    for name in tensors:
        if name not in MAPS and not tensors[name].is_floating_point():
            raise ModelFormatError(f"tensor '{name}' in {where} is stored as {tensors[name].dtype}, and no "
                                   "quantization_config says what that stands for.")
        if name not in MAPS and not torch.isfinite(tensors[name]).all():
            raise ModelFormatError(f"tensor '{name}' in {where} holds values that are not numbers: training has "
                                   "failed, or the file is damaged. Take an earlier checkpoint.")
    if config.reduced:
        target_ids(config, tensors["d2t"], where)
    if "t2d" in tensors:
        _check_t2d(config, tensors, where)


def check_nothing_left(tensors: Mapping[str, torch.Tensor], known: set[str], where: str) -> None:
    more = [name for name in tensors if name not in known and name != "t2d"]
    if more:
        raise ModelFormatError(f"{where} holds {_some(more)}, of which its config says nothing: this version does not "
                               "know what to do with it, so the head would draft badly. Load another one, or correct "
                               "the config.")


def target_ids(config: HeadConfig, d2t: torch.Tensor, where: str) -> torch.Tensor:
    """[draft vocabulary] int64, ascending: the target's id of each draft id."""
    ids = torch.arange(config.draft_vocab_size) + d2t.to("cpu", torch.int64)
    if d2t.is_floating_point() or ids.min() < 0 or ids.max() >= config.vocab_size or (ids.diff() <= 0).any():
        raise ModelFormatError(f"tensor 'd2t' in {where} does not map draft ids to ascending ids of the target (id i "
                               f"stands for i + d2t[i], below {config.vocab_size}): the file is of another format.")
    return ids


def _check_t2d(config: HeadConfig, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    t2d = tensors["t2d"].bool()
    wanted = torch.zeros(config.vocab_size, dtype=torch.bool)
    if config.reduced:
        wanted[target_ids(config, tensors["d2t"], where)] = True
    else:
        wanted[:] = True
    if t2d.shape != wanted.shape or not torch.equal(t2d, wanted):
        raise ModelFormatError(f"tensors 'd2t' and 't2d' in {where} do not name the same tokens: they are of different "
                               "trainings.")


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
