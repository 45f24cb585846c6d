"""Tiny random models in memory, and engines around them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.core import Engine
from paceline.llm import LLM
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.sampling.native import load as native_sampler
from paceline.sampling.pipeline import Pipeline, Processed, SampleRow

VOCAB = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 21},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"model_type": "deepseek_v2", "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                    "v_head_dim": 6, "moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": 2,
                    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                    "v_head_dim": 6, "q_lora_rank": 12, "moe_intermediate_size": 12, "n_routed_experts": 8,
                    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
                    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "deepseek_dense": {"model_type": "deepseek_v2", "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                       "v_head_dim": 6},
    "shared_keys": {"model_type": "llama", "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 14, "query_pre_attn_scalar": 12,
               "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 15, "sliding_window_pattern": 3,
               "query_pre_attn_scalar": 12, "rope_theta": 50000.0, "rope_local_base_freq": 1000.0},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": 4},
    "gpt_neox": {"model_type": "gpt_neox", "head_dim": 16, "num_key_value_heads": 4},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "head_dim": 16, "sliding_window": 40, "partial_rotary_factor": 0.75},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24, "mlp_only_layers": [1]},
}


HEADS_OF_THEIR_OWN = {"gemma2": "", "gpt_neox": "", "olmo2": "c"}
"""Tied to these, greedy decoding stays on one or two tokens, and equality would mean little. What their weights' names
are salted with: the first that gives a lively text."""


class RandomWeights:
    """Every tensor there is, filled from its own name: the same in every process."""

    def __init__(self, gain: float = 1.5, salt: str = "", head: bool = False) -> None:
        """Large enough by default that the next token depends on the whole context, so that equality means
        something; a small gain makes a calm model, in which small errors stay small. `head`: it is not tied."""
        self._gain = gain
        self._salt = salt
        self._head = head

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256((name + self._salt).encode()).digest()[:7], "little")
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if name.endswith("norm.weight"):
            return 1.0 + 0.1 * values
        return values * (self._gain / shape[-1] ** 0.5 if len(shape) > 1 else 0.1)

    def has(self, name: str) -> bool:
        return self._head or name != "lm_head.weight"


def tiny_model(name: str = "llama", **changes: Any) -> Any:
    head = name in HEADS_OF_THEIR_OWN
    shape = ModelConfig.from_dict(BASE | SHAPES[name] | {"tie_word_embeddings": not head} | changes)
    return build(shape, RandomWeights(salt=HEADS_OF_THEIR_OWN.get(name, ""), head=head), shape.max_position_embeddings)


def tiny_engine(model: Any = None, tokenizer: Any = None, trained: Any = None,
                clock: Callable[[], float] = time.monotonic, **options: Any) -> Engine:
    """`trained`: heads of the model by their names."""
    options = {"deterministic": True, "kv_blocks": 400, "block_size": 8, "max_num_seqs": 40} | options
    return engine_for(model if model is not None else tiny_model(), tokenizer, EngineOptions.of(**options),
                      device=torch.device("cpu"), revision="tiny", heads=trained, clock=clock,
                      eos_ids=frozenset() if tokenizer is None else tokenizer.eos_ids)


def tiny_llm(model: Any = None, tokenizer: Any = None, **options: Any) -> LLM:
    return LLM.from_engine(tiny_engine(model, tokenizer, **options))


class RecordingPipeline(Pipeline):
    """Keeps the raw logits of every row that was sampled, by (seed, position, draft path)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, native_sampler())
        self.seen: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}

    def process(self, logits: torch.Tensor, rows: list[SampleRow]) -> Processed:
        for row, values in zip(rows, logits):
            self.seen[(row.state.seed, row.position, tuple(row.path))] = values.clone()
        return super().process(logits, rows)

    def logits_of(self, seed: int, prompt_len: int, tokens: list[int]) -> list[torch.Tensor]:
        """The logits each of `tokens` was drawn from, whatever draft it was verified in."""
        out = []
        for index in range(len(tokens)):
            position = prompt_len + index
            paths = [tuple(tokens[begin:index]) for begin in range(index + 1)]
            found = [self.seen[key] for path in paths if (key := (seed, position, path)) in self.seen]
            assert found, f"no logits recorded at position {position}"
            out.extend(found[:1])
            for other in found[1:]:
                assert torch.equal(found[0], other), f"a position computed twice differs at {position}"
        return out


def record(llm: LLM) -> RecordingPipeline:
    pipeline = RecordingPipeline(llm.engine.model.config.vocab_size)
    llm.engine.decider._pipeline = pipeline
    return pipeline
