"""Models that are known by name: the sizes of their config.json, so that a plan needs neither files nor a network."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError
from paceline.hub.client import Hub
from paceline.hub.names import hub_name
from paceline.hub.store import here
from paceline.plan.read import read_shape
from paceline.plan.shape import BITS, ModelShape

_STORED = ("float32", "float16", "int8", "int4")
"""What a .gguf file may be counted as, by its size."""


def _sizes(family: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, context: int,
           **more: Any) -> dict[str, Any]:
    return {"model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": context, "tie_word_embeddings": False, **more}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_GPT_OSS: dict[str, Any] = {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4,
                            "quantization_config": {"quant_method": "mxfp4"}}


def _alternating(layers: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]}


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _sizes("llama", 30, 576, 9, 3, 1536, 49152, 8192, **_TIED),
    "smollm2-360m": _sizes("llama", 32, 960, 15, 5, 2560, 49152, 8192, **_TIED),
    "smollm2-1.7b": _sizes("llama", 24, 2048, 32, 32, 8192, 49152, 8192, **_TIED),
    "llama-2-7b": _sizes("llama", 32, 4096, 32, 32, 11008, 32000, 4096, dtype="float16"),
    "llama-2-13b": _sizes("llama", 40, 5120, 40, 40, 13824, 32000, 4096, dtype="float16"),
    "llama-2-70b": _sizes("llama", 80, 8192, 64, 8, 28672, 32000, 4096, dtype="float16"),
    "llama-3-8b": _sizes("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _sizes("llama", 80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _sizes("llama", 32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _sizes("llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _sizes("llama", 126, 16384, 128, 8, 53248, 128256, 131072),
    "llama-3.2-1b": _sizes("llama", 16, 2048, 32, 8, 8192, 128256, 131072, head_dim=64, **_TIED),
    "llama-3.2-3b": _sizes("llama", 28, 3072, 24, 8, 8192, 128256, 131072, head_dim=128, **_TIED),
    "llama-3.3-70b": _sizes("llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    "mistral-7b": _sizes("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, sliding_window=4096),
    "mixtral-8x7b": _sizes("mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8,
                           num_experts_per_tok=2),
    "mixtral-8x22b": _sizes("mixtral", 56, 6144, 48, 8, 16384, 32768, 65536, num_local_experts=8,
                            num_experts_per_tok=2),
    "qwen2.5-0.5b": _sizes("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, **_TIED),
    "qwen2.5-1.5b": _sizes("qwen2", 28, 1536, 12, 2, 8960, 151936, 32768, **_TIED),
    "qwen2.5-7b": _sizes("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768),
    "qwen2.5-32b": _sizes("qwen2", 64, 5120, 40, 8, 27648, 152064, 32768),
    "qwen2.5-72b": _sizes("qwen2", 80, 8192, 64, 8, 29568, 152064, 32768),
    "qwen3-0.6b": _sizes("qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, head_dim=128, **_TIED),
    "qwen3-1.7b": _sizes("qwen3", 28, 2048, 16, 8, 6144, 151936, 40960, head_dim=128, **_TIED),
    "qwen3-4b": _sizes("qwen3", 36, 2560, 32, 8, 9728, 151936, 40960, head_dim=128, **_TIED),
    "qwen3-8b": _sizes("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128),
    "qwen3-14b": _sizes("qwen3", 40, 5120, 40, 8, 17408, 151936, 40960, head_dim=128),
    "qwen3-32b": _sizes("qwen3", 64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128),
    "qwen3-30b-a3b": _sizes("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, head_dim=128, num_experts=128,
                            num_experts_per_tok=8, moe_intermediate_size=768),
    "qwen3-235b-a22b": _sizes("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, 40960, head_dim=128, num_experts=128,
                              num_experts_per_tok=8, moe_intermediate_size=1536),
    "qwen3-next-80b-a3b": _sizes(
        "qwen3_next", 48, 2048, 16, 2, 5120, 151936, 262144, head_dim=256, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
        linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32, linear_value_head_dim=128),
    "gemma-2b": _sizes("gemma", 18, 2048, 8, 1, 16384, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-2b": _sizes("gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-9b": _sizes("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, **_TIED),
    "gemma-2-27b": _sizes("gemma2", 46, 4608, 32, 16, 36864, 256000, 8192, head_dim=128, **_TIED),
    "gemma-3-1b": _sizes("gemma3_text", 26, 1152, 4, 1, 6912, 262144, 32768, sliding_window=512, **_TIED),
    "gemma-3-4b": _sizes("gemma3_text", 34, 2560, 8, 4, 10240, 262208, 131072, head_dim=256, sliding_window=1024,
                         **_TIED),
    "gemma-3-12b": _sizes("gemma3_text", 48, 3840, 16, 8, 15360, 262208, 131072, sliding_window=1024, **_TIED),
    "gemma-3-27b": _sizes("gemma3_text", 62, 5376, 32, 16, 21504, 262208, 131072, head_dim=128, sliding_window=1024,
                          **_TIED),
    "phi-3-mini": _sizes("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-4-mini": _sizes("phi3", 32, 3072, 24, 8, 8192, 200064, 131072, **_TIED),
    "phi-4": _sizes("phi3", 40, 5120, 40, 10, 17920, 100352, 16384),
    "olmo-2-1b": _sizes("olmo2", 16, 2048, 16, 16, 8192, 100352, 4096),
    "olmo-2-7b": _sizes("olmo2", 32, 4096, 32, 32, 11008, 100352, 4096),
    "deepseek-v2-lite": _sizes("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, 163840, n_routed_experts=64,
                               num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
                               first_k_dense_replace=1, **_DEEPSEEK),
    "deepseek-v2": _sizes("deepseek_v2", 60, 5120, 128, 128, 12288, 102400, 163840, q_lora_rank=1536,
                          n_routed_experts=160, num_experts_per_tok=6, moe_intermediate_size=1536, n_shared_experts=2,
                          first_k_dense_replace=1, **_DEEPSEEK),
    "deepseek-v3": _sizes("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, 163840, q_lora_rank=1536,
                          n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
                          first_k_dense_replace=3, quantization_config={"quant_method": "fp8"}, **_DEEPSEEK),
    "gpt-oss-20b": _sizes("gpt_oss", 24, 2880, 64, 8, 2880, 201088, 131072, num_local_experts=32,
                          **_alternating(24), **_GPT_OSS),
    "gpt-oss-120b": _sizes("gpt_oss", 36, 2880, 64, 8, 2880, 201088, 131072, num_local_experts=128,
                           **_alternating(36), **_GPT_OSS),
    "lfm2-1.2b": _sizes("lfm2", 16, 2048, 32, 8, 12288, 65536, 128000, full_attn_idxs=[2, 5, 8, 10, 12, 14],
                        block_auto_adjust_ff_dim=True, **_TIED),
    "mamba2-2.7b": {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 2560, "vocab_size": 50288,
                    "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4, **_TIED},
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
             "vocab_size": 50257, "dtype": "float32"},
}
_ENDINGS = re.compile(r"-(instruct|chat|it|base|hf|pt|v\d+(\.\d+)?|\d{4})$")


@dataclass(frozen=True, slots=True)
class Found:
    """What is said of a model, or of a head."""

    name: str
    raw: Mapping[str, Any]
    """Its config.json."""
    folder: Path | None = None
    """Of its files, where they are here."""
    dtype: str | None = None
    """Of its weights; None: as the config has it."""

    @property
    def shape(self) -> ModelShape:
        shape = read_shape(self.raw, self.name)
        return shape if self.dtype is None else replace(shape, dtype=self.dtype)


def known_shape(name: str) -> ModelShape | None:
    """By its short name, or that of a hub id such as meta-llama/Llama-2-13b-chat-hf."""
    found = _known(name)
    return None if found is None else found.shape


def _known(name: str) -> Found | None:
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    while short not in KNOWN and _ENDINGS.search(short):
        short = _ENDINGS.sub("", short)
    return Found(short, KNOWN[short]) if short in KNOWN else None


def find_shape(model: str) -> ModelShape:
    """A folder or config.json, a .gguf file, a known name, or a hub id, of which config.json alone is fetched."""
    return find_config(model).shape


def find_config(model: str) -> Found:
    """By the same names as find_shape()."""
    known = None if _is_path(model) else _known(model) or _known(model.partition(":")[0])
    if known is not None and ":" not in model:
        return known
    if (path := here(model)) is not None:
        return _from_files(path)
    if known is not None:
        return known
    if (wanted := hub_name(model)) is not None:
        return _from_hub(wanted.repo)
    near = difflib.get_close_matches(model.lower(), KNOWN, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(KNOWN)}."
    raise ConfigError(f"There is no model {model!r} here, and none is known by that name: give the folder of its "
                      f"config.json, a hub id like owner/name, or a known name; {hint}")


def _is_path(model: str) -> bool:
    try:
        return bool(model) and Path(model).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name too long for a file, nobody's home
        return False


def _from_files(path: Path) -> Found:
    name = path.resolve().parent.name if path.name == "config.json" else path.resolve().name.removesuffix(".gguf")
    file = path / "config.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        from paceline.models.load.reading import read_object

        return Found(name, read_object(file), file.parent)
    if path.is_file() and path.suffix != ".gguf":
        raise ModelFormatError(f"{path} is neither a config.json nor a .gguf file: give one of them, or a folder.")
    from paceline.models.load.opening import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        found = Found(name, checkpoint.config)
        bits = 8 * checkpoint.path.stat().st_size / found.shape.parameters
    return replace(found, dtype=min(_STORED, key=lambda dtype: abs(BITS[dtype] - bits)))


def _from_hub(repo: str) -> Found:
    try:
        raw, _ = Hub.of_environment().json(f"{repo}/resolve/main/config.json", repo)
    except ModelNotFoundError as problem:
        raise ModelNotFoundError(f"config.json of '{repo}' could not be fetched from the hub: {problem} Or give the "
                                 "path of a config.json.") from problem
    if not isinstance(raw, dict):
        raise ModelFormatError(f"config.json of '{repo}' on the hub is no object: name another model.")
    return Found(repo, raw)
