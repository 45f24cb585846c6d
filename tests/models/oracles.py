"""Tiny random transformers models: each is saved, loaded into Paceline, and asked the same questions."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

from paceline.models.config import ModelConfig
from paceline.models.interface import CausalLM
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.weights import Weights
from paceline.models.registry import build

VOCAB = 97
MAX_LEN = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": MAX_LEN, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False}

_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                    "mscale_all_dim": 1.1, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}
SCALINGS = sorted(_SCALINGS)


@dataclass
class Oracle:
    theirs: Any
    ours: CausalLM
    raw: dict[str, Any]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), V] by transformers, in one pass without a cache."""
        return self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]


def _config(name: str) -> Any:
    shape = dict(_SHAPE)
    if name == "llama":
        return transformers.LlamaConfig(**shape)
    if name == "llama-biased-tied":
        shape["tie_word_embeddings"] = True
        return transformers.LlamaConfig(**shape, attention_bias=True, mlp_bias=True)
    if name == "llama-mha":
        return transformers.LlamaConfig(**(shape | {"num_key_value_heads": 6}))
    if name == "llama-mqa":
        return transformers.LlamaConfig(**(shape | {"num_key_value_heads": 1}))
    if name.startswith("rope-"):
        kind = name.removeprefix("rope-")
        if kind == "dynamic":
            shape["max_position_embeddings"] = 64
        return transformers.LlamaConfig(**shape, rope_parameters={"rope_theta": 10000.0, **_SCALINGS[kind]})
    if name == "mistral":
        return transformers.MistralConfig(**shape, sliding_window=13)
    if name == "qwen2":
        return transformers.Qwen2Config(**shape, use_sliding_window=True, sliding_window=11, max_window_layers=1)
    if name == "qwen3":
        return transformers.Qwen3Config(**shape)
    if name == "mixtral":
        return transformers.MixtralConfig(**shape, num_local_experts=5, num_experts_per_tok=2)
    if name.startswith("deepseek"):
        return _deepseek(name, shape)
    return _OTHERS[name](shape)


def _gpt2(shape: dict[str, Any]) -> Any:
    return transformers.GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=3, n_positions=MAX_LEN,
                                   initializer_range=0.2)


def _neox(shape: dict[str, Any], **changes: Any) -> Any:
    others = ("rms_norm_eps", "head_dim", "num_key_value_heads")
    dense = {key: value for key, value in shape.items() if key not in others}
    return transformers.GPTNeoXConfig(**dense, layer_norm_eps=1e-5, rotary_pct=0.25, **changes)


def _phi3(shape: dict[str, Any], **changes: Any) -> Any:
    wide = shape | {"hidden_size": 96, "head_dim": 16, "original_max_position_embeddings": 128}
    return transformers.Phi3Config(**wide, pad_token_id=0, **changes)


_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 7 for i in range(6)],
         "long_factor": [2.0 + i for i in range(6)], "partial_rotary_factor": 0.75}
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 11, "tie_word_embeddings": True, "sliding_window": 12}
_OTHERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gemma2": lambda shape: transformers.Gemma2Config(
        **(shape | _GEMMA), attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3": lambda shape: transformers.Gemma3TextConfig(
        **(shape | _GEMMA), sliding_window_pattern=3,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}),
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "gpt_neox-sequential": lambda shape: _neox(shape, use_parallel_residual=False),
    "olmo2": lambda shape: transformers.Olmo2Config(
        **{key: value for key, value in shape.items() if key != "head_dim"}),
    "phi3": _phi3,
    "phi3-long": lambda shape: _phi3(shape, rope_parameters=dict(_LONG)),
    "phi3-window": lambda shape: _phi3(shape, sliding_window=14),
    "qwen3_moe": lambda shape: transformers.Qwen3MoeConfig(
        **shape, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[1]),
    "qwen3_moe-plain": lambda shape: transformers.Qwen3MoeConfig(
        **shape, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False),
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "moe_intermediate_size": 20,
    "n_routed_experts": 12, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
    "num_key_value_heads": 6}


def _deepseek(name: str, shape: dict[str, Any]) -> Any:
    shape = {key: value for key, value in (shape | _LATENT).items() if key != "head_dim"}
    if name == "deepseek_v2":  # as V2: a low-rank query, experts in groups
        return transformers.DeepseekV2Config(**shape, q_lora_rank=20, n_shared_experts=2, attention_bias=True,
                                             topk_method="group_limited_greedy", n_group=4, topk_group=2)
    if name == "deepseek_v2-lite":  # whole queries, no groups, stretched positions
        return transformers.DeepseekV2Config(
            **shape, q_lora_rank=None, n_shared_experts=1, topk_method="greedy",
            rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "mscale": 0.707,
                             "mscale_all_dim": 0.707, "original_max_position_embeddings": 64})
    if name == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **shape, q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=2, num_mtp_layers=0,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                             "mscale_all_dim": 0.8, "original_max_position_embeddings": 64})
    raise ValueError(name)


ARCHITECTURES = ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3", "gemma2", "gemma3", "gpt2", "gpt_neox", "llama",
                 "llama-biased-tied", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"]


@cache
def oracle(name: str, max_model_len: int = MAX_LEN) -> Oracle:
    torch.manual_seed(sum(map(ord, name)))
    theirs = transformers.AutoModelForCausalLM.from_config(_config(name), attn_implementation="eager").eval()
    for key, parameter in theirs.named_parameters():
        # transformers starts these at 0 and 1, which would hide mistakes
        norm = "norm" in key or ".ln_" in key
        if key.endswith("bias") or norm:
            torch.nn.init.normal_(parameter, mean=float(norm and not key.endswith("bias")), std=0.3)
    for key, buffer in theirs.named_buffers():
        if key.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        with open_checkpoint(folder) as checkpoint:
            raw = dict(checkpoint.config)
            weights = Weights(checkpoint, torch.float32, "cpu")
            ours = build(ModelConfig.from_dict(raw), weights, max_model_len)
            assert weights.unused() == []
    return Oracle(theirs, ours, raw)


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)
