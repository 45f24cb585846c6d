"""A trained head on disk, in the speculators format: config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.models.heads.config import HeadConfig
from paceline.training.shards import make_folder, replace_file

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def write(folder: Path, config: HeadConfig, tensors: dict[str, torch.Tensor], ids: np.ndarray,
          dtype: torch.dtype = torch.float16) -> None:
    """`ids`: the target's id of each draft id."""
    make_folder(folder)
    out = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if config.reduced:
        out["d2t"] = torch.from_numpy(ids - np.arange(len(ids))).to(torch.int64)
        out["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        out["t2d"][torch.from_numpy(ids)] = True

    def save(path: Path) -> None:
        try:
            save_file(out, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
        path.chmod(0o644)  # safetensors makes files that only their owner may read

    replace_file(folder / "model.safetensors", save)
    text = json.dumps(speculators(config), indent=2) + "\n"
    replace_file(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a head to train further."""
    file = folder / "model.safetensors"
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read the head {file} ({error}): name the folder of one with --init.") from None


def mask_of(folder: Path, otherwise: int) -> int:
    """The mask token of a head to train further."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("mask_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"Cannot read {folder / 'config.json'} ({error}): name the folder of a head with --init."
                          ) from None
    return otherwise if found is None else int(found)


def speculators(config: HeadConfig) -> dict[str, Any]:
    """config.json. What the format has no field for stands under "paceline"."""
    layer = {"model_type": "llama", "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
             "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
             "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
             "intermediate_size": config.intermediate_size, "rms_norm_eps": config.norm_eps,
             "rope_theta": config.rope_theta, "max_position_embeddings": config.max_position_embeddings,
             "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    block = {"block_size": config.block_size, "aux_hidden_state_layer_ids": list(config.taps),
             "mask_token_id": config.mask_token_id, "sample_from_anchor": config.sample_from_anchor,
             "sliding_window_non_causal": False, "markov_rank": config.markov_rank,
             "markov_head_type": config.markov_head_type, "enable_confidence_head": config.confidence_head,
             "confidence_head_with_markov": config.confidence_head_with_markov}
    chain = {"eagle_aux_hidden_state_layer_ids": list(config.taps), "norm_before_residual": config.norm_before_residual}
    return {
        "architectures": [f"{config.kind.capitalize()}Speculator"], "speculators_model_type": config.kind,
        "transformer_layer_config": layer, "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size, **(block if config.kind == "dspark" else chain),
        **({"heads": config.heads} if config.heads else {}),
        "speculators_config": {
            "algorithm": config.kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.speculative_tokens}],
            "verifier": {"name_or_path": config.target, "architectures": []}},
        "paceline": {"taps": list(config.taps), "tokenizer": config.tokenizer},
        "tie_word_embeddings": True}
