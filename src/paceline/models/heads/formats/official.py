"""What the authors of EAGLE, Medusa, Hydra, DFlash and DSpark publish themselves."""

from __future__ import annotations

from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig
from paceline.models.fields import MOST_LAYERS
from paceline.models.heads.config import MOST_DRAFTED, HeadConfig
from paceline.models.heads.formats.fields import HeadFields
from paceline.models.heads.formats.files import Tensors
from paceline.models.heads.formats.marks import is_eagle3_config
from paceline.models.heads.formats.shape import read_shape
from paceline.models.heads.formats.speculators import default_taps

BLOCK_ONLY = ("num_target_layers", "num_anchors", "target_model_type")
EAGLE_ONLY = ("bias", "num_aux_hidden_states", "target_model_type", "num_target_layers", "ttt_length",
              "step_loss_decay", "draft_num_hidden_layers")
"""Keys that say how it was trained, or what is found otherwise."""


def is_eagle3(raw: dict[str, Any], tensors: Tensors) -> bool:
    """Of heads with target_layer_ids those of DeepSpec that are no blocks."""
    return is_eagle3_config(raw) or "layers.0.hidden_norm.weight" in tensors


def read_eagle(raw: dict[str, Any], tensors: Tensors, target: ModelConfig,
               where: str) -> tuple[HeadConfig, Tensors]:
    """EAGLE-1 and EAGLE-3, which are told apart by the norms of their one layer, and DeepSpec's EAGLE-3, whose
    target_layer_ids i name what LEAVES layer i."""
    renamed = {name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name: tensor
               for name, tensor in tensors.items()}
    fields = HeadFields(raw, where)
    found = read_shape(fields)
    leaving = fields.counts("target_layer_ids")
    third = leaving is not None or "layers.0.hidden_norm.weight" in renamed
    found |= {"kind": "eagle3" if third else "eagle1", "own_embedding": "embed_tokens.weight" in renamed,
              "own_lm_head": "lm_head.weight" in renamed, "fc_bias": "fc.bias" in renamed,
              "qk_norm": "layers.0.self_attn.q_norm.weight" in renamed}
    said = fields.part("eagle_config")
    if third:
        taps = fields.counts("eagle_aux_hidden_state_layer_ids")
        taps = said.counts("eagle_aux_hidden_state_layer_ids") if taps is None else taps
        taps = tuple(layer + 1 for layer in leaving) if leaving is not None else taps
        found |= {"taps": default_taps(target) if taps is None else taps,
                  "draft_vocab_size": fields.count("draft_vocab_size", found["vocab_size"]),
                  "norm_before_residual": fields.flag("norm_before_residual"),
                  "norm_before_fc": fields.flag("norm_before_fc")}
    else:
        found |= {"taps": (target.num_layers,), "draft_vocab_size": found["vocab_size"]}
    if fields.count("target_hidden_size", found["hidden_size"]) != found["hidden_size"]:
        raise ModelFormatError(f"{where}: target_hidden_size differs from the head's hidden_size, which is not "
                               "supported: take a head of the target's own width.")
    said.get("use_aux_hidden_state")
    said.done()
    found["target"] = fields.text("target_model_name_or_path", "") or None
    fields.done(EAGLE_ONLY)
    return HeadConfig(**found), renamed


def read_block(raw: dict[str, Any], tensors: Tensors, target: ModelConfig,
               where: str) -> tuple[HeadConfig, Tensors]:
    """z-lab's DFlash and DeepSpec's DFlash and DSpark. Their target_layer_ids i name what LEAVES layer i, which is
    what enters layer i + 1."""
    fields = HeadFields(raw, where)
    own = fields.part("dflash_config")
    found = read_shape(fields)
    leaving = fields.counts("target_layer_ids")
    leaving = own.counts("target_layer_ids") if leaving is None else leaving
    if not leaving:
        raise ModelFormatError(f"{where} has no target_layer_ids: nothing says which layers of the target this head "
                               "reads.")
    spark = any("DSpark" in name for name in fields.texts("architectures") or ())
    block = fields.get("block_size")
    mask = fields.get("mask_token_id")
    found |= {"kind": "dspark" if spark else "dflash", "taps": tuple(layer + 1 for layer in leaving),
              "block_size": (own if block is None else fields).count("block_size", most=MOST_DRAFTED),
              "mask_token_id": (own if mask is None else fields).count("mask_token_id", least=0),
              "sample_from_anchor": spark, "draft_vocab_size": found["vocab_size"],
              "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
              "own_embedding": "embed_tokens.weight" in tensors, "own_lm_head": "lm_head.weight" in tensors}
    if spark:
        found |= {"markov_rank": fields.count("markov_rank", 0),
                  "markov_head_type": fields.text("markov_head_type", "vanilla"),
                  "confidence_head": fields.flag("enable_confidence_head"),
                  "confidence_head_with_markov": fields.flag("confidence_head_with_markov")}
    own.done()
    fields.done(BLOCK_ONLY)
    return HeadConfig(**found), tensors


def read_stacked(raw: dict[str, Any], tensors: Tensors, target: ModelConfig,
                 where: str) -> tuple[HeadConfig, Tensors]:
    """Medusa and Hydra. Their config.json says little, and of Medusa's first models the wrong number of heads: what is
    in the file counts."""
    fields = HeadFields(raw, where)
    hydra = fields.get("hydra_num_heads") is not None
    tensors = {name.removeprefix("medusa_head.").removeprefix("hydra_head_model."): tensor
               for name, tensor in tensors.items()}
    start = "hydra_mlp." if hydra else ""
    found = {parts[0] for name in tensors
             if (parts := name.removeprefix(start).split("."))[0].isdigit() and name.startswith(start)}
    layers = fields.count("hydra_num_layers" if hydra else "medusa_num_layers", 1, least=0, most=MOST_LAYERS)
    fields.count("medusa_num_heads", 1, least=0)
    if hydra and (not fields.flag("grounded_heads", True) or fields.text("hydra_head_arch", "mlp") != "mlp"):
        raise ModelFormatError(f"{where}: only Hydra's plain grounded heads (hydra_head_arch 'mlp', grounded_heads "
                               f"true) are supported, got {raw.get('hydra_head_arch')!r} with grounded_heads "
                               f"{raw.get('grounded_heads')!r}.")
    width, vocab = fields.count("hidden_size", target.hidden_size), fields.count("vocab_size", target.vocab_size)
    fields.done(("base_model_name_or_path", "version", "truncated_vocab_size", "max_paths", "topk",
                 "dropout_rate"))
    return HeadConfig(
        kind="hydra" if hydra else "medusa", hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab,
        taps=(target.num_layers,), num_layers=layers, heads=len(found), norm_eps=target.norm_eps, own_lm_head=True,
        target=fields.text("base_model_name_or_path", "") or None), tensors
