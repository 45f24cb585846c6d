"""GGUF files of every family: tiny random models written as llama.cpp's converter does, against transformers.

Names come from the gguf package's own table; what the converter does to tensors beyond renaming is written out here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from harness import Hand
from model_files import write_gguf
from oracles import Oracle, oracle, text

from paceline.errors import ModelFormatError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.weights import Weights
from paceline.models.registry import build

EAGER = select(False, torch.device("cpu"))
FILES = {"gemma2": "gemma2", "gemma3": "gemma3", "gpt2": "gpt2", "gpt_neox": "gptneox", "olmo2": "olmo2",
         "phi3": "phi3", "phi3-long": "phi3", "qwen3_moe-plain": "qwen3moe"}
ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def converted(name: str, tensor: torch.Tensor, family: str, case: Oracle) -> torch.Tensor:
    if family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return tensor + 1
    if family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.t()
    if "query_key_value" in name:  # head by head -> all queries, all keys, all values
        heads = case.theirs.config.num_attention_heads
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    return tensor


def tensors_of(case: Oracle, family: str) -> dict[str, tuple[np.ndarray, str]]:
    layers = case.theirs.config.num_hidden_layers
    table = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    written, experts = {}, {}
    for name, tensor in case.theirs.state_dict().items():
        if name == "lm_head.weight" and case.theirs.config.tie_word_embeddings:
            continue
        if ".experts." in name:  # transformers merges them already, gate and up stacked
            prefix = name.split(".")[2]
            if name.endswith("gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                experts |= {f"blk.{prefix}.ffn_gate_exps.weight": gate, f"blk.{prefix}.ffn_up_exps.weight": up}
            else:
                experts[f"blk.{prefix}.ffn_down_exps.weight"] = tensor
            continue
        stem, kind = name.rsplit(".", 1)
        theirs = table.get_name(stem)
        assert theirs is not None, name
        written[f"{theirs}.{kind}"] = converted(name, tensor, family, case)
    return {name: (tensor.detach().contiguous().numpy(), "F32") for name, tensor in (written | experts).items()}


def metadata_of(case: Oracle, family: str) -> dict[str, Any]:
    config = ModelConfig.from_dict(case.raw)
    known: dict[str, Any] = {
        "block_count": config.num_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope.theta, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.sliding_window": config.windows[0]}
    if family in ("gpt2", "gptneox"):
        known |= {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": config.norm_eps}
    if family == "gptneox":
        known |= {"rope.dimension_count": config.rope.rotary_dim, "use_parallel_residual": True}
    if family == "gemma2":
        known |= {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
    if family == "gemma3":
        known |= {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0, "rope.freq_base_swa": 1000.0}
    if family == "qwen3moe":
        known |= {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token,
                  "expert_feed_forward_length": config.expert_size}
    if family == "phi3":
        known["rope.dimension_count"] = config.rope.rotary_dim
    return known


@pytest.mark.parametrize("name", sorted(FILES))
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, case = FILES[name], oracle(name, max_model_len=128)
    raw, tensors, metadata = case.raw, tensors_of(case, family), metadata_of(case, family)
    if name == "phi3-long":
        rope = raw["rope_parameters"]
        tensors |= {f"rope_factors_{kind}.weight": (np.array(rope[f"{kind}_factor"], np.float32), "F32")
                    for kind in ("short", "long")}
        metadata |= {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": float(
            np.sqrt(1 + np.log(256 / 128) / np.log(128)))}
    with open_checkpoint(write_gguf(tmp_path / "model.gguf", family, metadata, tensors)) as checkpoint:
        config = checkpoint.config
        if family in ("gemma2", "gemma3"):
            assert config["query_pre_attn_scalar"] == 16, "files do not say: the head's size"
            config["query_pre_attn_scalar"] = raw["query_pre_attn_scalar"]
        if family == "gemma3":
            config["sliding_window_pattern"] = 3
        if family == "qwen3moe":
            assert config["norm_topk_prob"], "as llama.cpp takes it"
            config["norm_topk_prob"] = raw["norm_topk_prob"]
        weights = Weights(checkpoint, torch.float32, "cpu")
        ours = build(ModelConfig.from_dict(config), weights, 128)
        unused = [name for name in weights.unused() if not name.startswith("rope_factors")]
    assert unused == []
    tokens = text(60)
    torch.testing.assert_close(Hand(ours, EAGER).run(tokens, 25), case.logits(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "layers", "scalar"), [("gemma2", 46, 8), ("gemma2", 42, 16), ("gemma3", 62, 8)])
def test_the_largest_gemmas_scale_by_width(tmp_path: Path, family: str, layers: int, scalar: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", family, {"block_count": layers, "attention.key_length": 16})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["query_pre_attn_scalar"] == scalar


def test_an_unknown_architecture_is_named_with_the_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "bloom")
    with pytest.raises(ModelFormatError, match=r"'bloom'.*llama, qwen2, qwen3, gemma2, gemma3, gpt2"):
        open_checkpoint(path)
