"""GGUF metadata and tensor names in Hugging Face terms."""

from __future__ import annotations

import math
import re
from typing import Any

from paceline.errors import ModelFormatError
from paceline.models.fields import shown
from paceline.models.load.gguf import GGUFFile, Metadata
from paceline.models.load.gguf_families import FAMILIES

_CLASSES = {"mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Of what files call llama."""
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output_norm.bias": "model.norm.bias", "output.weight": "lm_head.weight",
        "position_embd.weight": "model.embed_positions.weight"}
_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
          "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
          "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "block_sparse_moe.gate"}
_NO_TOKEN = (-1, (1 << 32) - 1)
_EXPERT = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_PATTERN = re.compile(r"blk\.(\d+)\.([a-z_]+?)(_exps)?(?:\.(\d+))?\.(weight|bias)")


def hf_names(name: str, shape: tuple[int, ...], architecture: str = "llama") -> list[tuple[str, int | None]]:
    """Hugging Face names of a GGUF tensor: [(name, expert index within it or None)]; merged experts give one each.
    A tensor without a counterpart keeps its own name. Families that have names of their own get Llama's: what is
    stored under those lies as Llama's tensors do (models.translate)."""
    family = FAMILIES[architecture]
    if name in _TOP:
        return [(_TOP[name], None)]
    found = _PATTERN.fullmatch(name)
    if found is None:
        return [(name, None)]
    layer, part, merged, expert, kind = found.groups()
    if merged or expert is not None:
        parts = family.expert or _EXPERT
        if part not in parts:
            return [(name, None)]
        prefix = f"model.layers.{layer}.{'mlp' if family.expert else 'block_sparse_moe'}.experts"
        if merged:
            if len(shape) != 3:
                raise ModelFormatError(f"tensor '{name}' has the shape {list(shape)}, but the matrices of all experts "
                                       "have three dimensions: the file is corrupt, download it again.")
            return [(f"{prefix}.{index}.{parts[part]}.{kind}", index) for index in range(shape[0])]
        return [(f"{prefix}.{expert}.{parts[part]}.{kind}", None)]
    found_name = family.layer.get(part) or _LAYER.get(part)
    return [(name if found_name is None else f"model.layers.{layer}.{found_name}.{kind}", None)]


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json keys from the metadata. ModelFormatError names the key that is missing or not understood."""
    read = file.metadata
    architecture = read.text("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelFormatError(f"{file.path} has general.architecture {shown(architecture)}; this version runs "
                               f"{', '.join(FAMILIES)} (Mistral and Mixtral count as llama).")

    def count(key: str, default: int | None = None) -> int:
        return read.count(f"{architecture}.{key}", default)

    experts = count("expert_count", 0)
    window = count("attention.sliding_window", 0)
    model_type = family.model_type
    if architecture == "llama":
        model_type = "mixtral" if experts else "mistral" if window else "llama"
    elif experts and not family.expert:
        raise ModelFormatError(f"{file.path} has metadata key '{architecture}.expert_count': experts are supported "
                               "for Mixtral and Qwen3-MoE.")
    heads, hidden = count("attention.head_count"), count("embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"tensor 'token_embd.weight' is missing in {file.path}: it holds no language model, or "
                               "only a part of one; download the whole model.")
    head_dim = count("attention.key_length", hidden // heads)
    rotated = count("rope.dimension_count", head_dim)
    if rotated != head_dim and (architecture == "llama" or not rotated < head_dim):
        raise ModelFormatError(f"metadata key '{architecture}.rope.dimension_count' in {file.path} is {rotated}, but "
                               f"heads have {head_dim} values: such a rotation is not supported.")
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_CLASSES.get(model_type, family.class_name)],
        "hidden_size": hidden,
        "num_hidden_layers": count("block_count"),
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_theta": read.positive(f"{architecture}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, architecture),
        "rms_norm_eps": read.positive(
            f"{architecture}.attention.layer_norm_epsilon", 0.0)
            or read.positive(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": count("context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        "sliding_window": window or None,
        "bos_token_id": token_id(read, "bos"),
        "eos_token_id": token_id(read, "eos"),
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if experts:
        config["num_local_experts"] = experts
        config["num_experts_per_tok"] = count("expert_used_count")
    return config | family.more(file, config)


def token_id(read: Metadata, role: str) -> int | None:
    """None: the file does not say, or says (by -1, or the largest number there is) that there is none."""
    key = f"tokenizer.ggml.{role}_token_id"
    found = read.get(key)
    return None if found is None or (isinstance(found, int) and found in _NO_TOKEN) else read.count(key, least=0)


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    prefix, read = f"{architecture}.rope.scaling", file.metadata
    kind = read.text(f"{prefix}.type", "none")
    factor = read.positive(f"{prefix}.factor", 0.0)
    linear = read.positive(f"{architecture}.rope.scale_linear", 1.0)
    if kind == "none" and linear != 1.0:
        kind, factor = "linear", linear
    if kind in ("linear", "yarn") and not factor:
        raise ModelFormatError(f"{file.path} has metadata key '{prefix}.type' = '{kind}' without a positive "
                               f"'{prefix}.factor': convert the model again.")
    if kind == "none":
        # Llama 3 scaling comes as the finished divisors of the frequencies, one tensor for all layers.
        return {"rope_type": "factors"} if "rope_freqs.weight" in file.tensors else None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling: dict[str, Any] = {
            "rope_type": "yarn", "factor": factor,
            "original_max_position_embeddings": read.count(f"{prefix}.original_context_length")}
        if file.has(f"{prefix}.attn_factor"):
            # GGUF's factor comes on top of the usual yarn magnitude; Hugging Face's replaces it.
            scaling["attention_factor"] = read.positive(f"{prefix}.attn_factor") * (0.1 * math.log(factor) + 1.0)
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if file.has(f"{prefix}.{theirs}"):
                scaling[ours] = read.positive(f"{prefix}.{theirs}")
        return scaling
    raise ModelFormatError(f"{file.path} has metadata key '{prefix}.type' = {shown(kind)}; this version knows none, "
                           "linear and yarn.")
