"""The speculators format: config.json with speculators_model_type, tensors under the names used here. What it has no
schema for (EAGLE-1, Medusa, Hydra) is written in the same manner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.config import ModelConfig
from paceline.models.fields import MOST_LAYERS, MOST_POSITIONS
from paceline.models.heads.config import BLOCK_KINDS, HEAD_KINDS, KINDS, MOST_DRAFTED, HeadConfig
from paceline.models.heads.formats.fields import HeadFields
from paceline.models.heads.formats.files import Tensors
from paceline.models.heads.formats.shape import read_shape, write_shape
from paceline.models.heads.tensors import lm_heads

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "eagle3": "Eagle3DraftModel",
                 "mtp": "MTPDraftModel", "eagle1": "EagleSpeculator", "medusa": "MedusaModel", "hydra": "HydraModel"}
EAGLE1 = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
"""Its "eagle" is EAGLE-1, with other names for the same tensors."""
OF_TRAINING = ("speculators_version", "embed_requires_grad", "num_anchors", "max_anchors", "ce_loss_alpha",
               "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma", "loss_fn", "auf", "lambda_base_start",
               "lambda_base_decay_ratio", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "enable_sp_ulysses",
               "sliding_window_non_causal")
"""Keys that say how it was trained, or what kinds without them have no use for."""


def default_taps(target: ModelConfig) -> tuple[int, ...]:
    """Of EAGLE-3 where nothing is said."""
    layers = target.num_layers
    return (2, layers // 2, layers - 3)


def read(raw: dict[str, Any], tensors: Tensors, target: ModelConfig, where: str) -> tuple[HeadConfig, Tensors]:
    fields = HeadFields(raw, where)
    kind = fields.text("speculators_model_type")
    if kind == "eagle":
        kind = "eagle1"
        fields.flag("fusion_bias")
        for old, new in EAGLE1.items():
            tensors = {new + name.removeprefix(old) if name.startswith(old) else name: tensor
                       for name, tensor in tensors.items()}
    if kind not in KINDS:
        raise ModelFormatError(f"{where}: speculators_model_type {kind!r} is not supported; supported are "
                               f"{', '.join(KINDS)}.")
    layer = fields.part("transformer_layer_config")
    found: dict[str, Any] = {"kind": kind}
    if kind in HEAD_KINDS:
        found |= {"hidden_size": layer.count("hidden_size"), "vocab_size": layer.count("vocab_size"),
                  "num_layers": layer.count("num_hidden_layers", least=0, most=MOST_LAYERS),
                  "heads": fields.count("num_heads", most=MOST_DRAFTED),
                  "norm_eps": layer.positive("rms_norm_eps", 1e-6),
                  "max_position_embeddings": layer.count("max_position_embeddings", 2048, most=MOST_POSITIONS)}
    else:
        found |= read_shape(layer, layers=kind != "mtp")
    layer.done()
    found["draft_vocab_size"] = fields.count("draft_vocab_size", found["vocab_size"])
    own = lm_heads(kind, found.get("heads", 0), found.get("num_layers", 1))
    found |= {"own_embedding": "embed_tokens.weight" in tensors,
              "own_lm_head": any(f"{name}.weight" in tensors for name in own)}
    if fields.count("target_hidden_size", found["hidden_size"]) != found["hidden_size"]:
        raise ModelFormatError(f"{where}: target_hidden_size differs from the head's hidden_size, which is not "
                               "supported: take a head of the target's own width.")
    if kind in BLOCK_KINDS:
        found |= _block(fields, kind)
    elif kind == "eagle3":
        taps = fields.counts("eagle_aux_hidden_state_layer_ids")
        found |= {"taps": default_taps(target) if taps is None else taps, "fc_bias": "fc.bias" in tensors,
                  "norm_before_residual": fields.flag("norm_before_residual"),
                  "norm_before_fc": fields.flag("norm_before_fc")}
    else:
        found |= {"taps": (target.num_layers,), "fc_bias": "fc.bias" in tensors}
        if kind == "mtp" and fields.count("num_nextn_predict_layers", 1) != 1:
            raise ModelFormatError(f"{where}: num_nextn_predict_layers above 1 is not supported.")
    found |= _spoken(fields)
    fields.done(OF_TRAINING)
    return HeadConfig(**found), tensors


def _block(fields: HeadFields, kind: str) -> dict[str, Any]:
    taps = fields.counts("aux_hidden_state_layer_ids")
    if not taps:
        raise ModelFormatError(f"{fields.where} has no aux_hidden_state_layer_ids: nothing says which layers of the "
                               "target this head reads.")
    projector = fields.text("projector_type", "dflash")
    if projector != "dflash" or fields.flag("shift_label"):
        raise ModelFormatError(f"{fields.where}: projector_type {projector!r} is not supported; only dflash is.")
    found: dict[str, Any] = {"taps": taps, "block_size": fields.count("block_size", most=MOST_DRAFTED),
                             "mask_token_id": fields.count("mask_token_id", least=0),
                             "sample_from_anchor": fields.flag("sample_from_anchor", kind == "dspark")}
    if kind == "dspark":
        found |= {"markov_rank": fields.count("markov_rank", 0),
                  "markov_head_type": fields.text("markov_head_type", "vanilla"),
                  "confidence_head": fields.flag("enable_confidence_head"),
                  "confidence_head_with_markov": fields.flag("confidence_head_with_markov")}
    return found


def _spoken(fields: HeadFields) -> dict[str, Any]:
    """What is said about the target and the number of tokens."""
    about = fields.part("speculators_config")
    methods, verifier = about.get("proposal_methods", []), about.part("verifier")
    first = methods[0] if isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens", 0) if isinstance(first, Mapping) else 0
    name = verifier.get("name_or_path")
    own = fields.part("paceline")
    return {"speculative_tokens": tokens if isinstance(tokens, int) and 0 <= tokens <= MOST_DRAFTED else 0,
            "target": name if isinstance(name, str) else None, "tokenizer": own.text("tokenizer", "") or None,
            "window": own.count("window") if own.get("window") is not None else None,
            "whole_vocabulary": own.flag("whole_vocabulary")}


def write(config: HeadConfig) -> dict[str, Any]:
    """What config.json says of such a head."""
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.kind]],
        "speculators_model_type": config.kind,
        "transformer_layer_config": write_shape(config), "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size}
    if config.kind in BLOCK_KINDS:
        raw |= {"aux_hidden_state_layer_ids": list(config.taps), "block_size": config.block_size,
                "mask_token_id": config.mask_token_id, "sample_from_anchor": config.sample_from_anchor}
    if config.kind == "dspark":
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type,
                "enable_confidence_head": config.confidence_head,
                "confidence_head_with_markov": config.confidence_head_with_markov}
    if config.kind == "eagle3":
        raw |= {"eagle_aux_hidden_state_layer_ids": list(config.taps),
                "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}
    if config.kind == "mtp":
        raw["num_nextn_predict_layers"] = 1
    if config.kind in HEAD_KINDS:
        raw["num_heads"] = config.heads
    tokens = config.speculative_tokens or config.depth or 3
    raw["speculators_config"] = {
        "algorithm": raw["speculators_model_type"], "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "verifier": {"name_or_path": config.target, "architectures": []}}
    own = {"tokenizer": config.tokenizer, "window": config.window, "whole_vocabulary": config.whole_vocabulary or None}
    if any(value is not None for value in own.values()):
        raw["paceline"] = {name: value for name, value in own.items() if value is not None}
    return raw
