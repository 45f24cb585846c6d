"""Tensor parallel on one card: both (or all four) shards of a model in one process, ranks as threads.

In deterministic mode every token and every log-probability has to have the bits that one rank gives, with drafts and
without; otherwise texts are compared and told. Then what a shard's kernels take, in microseconds inside a graph, beside
the whole model's, without what ranks would wait for each other. Exits with 1 where bits differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.bench.report import Row, document, json_argument, say
from paceline.cache.storage import KVStorage
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.parallel.together import together
from paceline.kernels import select
from paceline.kernels.interface import Kernels
from paceline.llm import LLM
from paceline.measure.kernel_time import decode_step, microseconds
from paceline.models.config import ModelConfig
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.models.registry import build
from paceline.models.shard import WHOLE, Shard
from paceline.parallel.communicator import Alone
from paceline.request import SamplingParams
from subjects import SHAPE, NamedWeights
from verdict import card, conclude

LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "intermediate_size": 14336, "num_hidden_layers": 1, "vocab_size": 8192, "max_position_embeddings": 2048}
LATENT = {"model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
          "v_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2,
          "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 8,
          "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "llama-8b-layer": LARGE, "deepseek": LATENT,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "olmo2": {"model_type": "olmo2"}, "gemma3": {"model_type": "gemma3_text", "sliding_window": 32,
                                                 "sliding_window_pattern": 3, "query_pre_attn_scalar": 64,
                                                 "tie_word_embeddings": False}}
SIZES = (2, 4)
DTYPE = torch.bfloat16
LENGTHS, TOKENS = (9, 140, 33, 64), 24
"""Of the prompts; of each text."""
WISHES: tuple[dict[str, Any] | None, ...] = (None, {"method": "ngram", "k": 4, "adaptive": False})
TIMED = ("llama-8b-layer",)
STEPS = ((1, 1024, 1), (8, 1024, 1), (64, 1024, 1), (1, 0, 512))
"""Requests, tokens before the step, rows of each."""


class ShardWeights(NamedWeights):
    """Of one rank."""

    def __init__(self, device: torch.device, shard: Shard) -> None:
        super().__init__(device, DTYPE)
        self.shard = shard


class Silent(Alone):
    """A rank whose others say what it says, at no cost: to time its kernels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return [part] * self.size


def builder(shape: dict[str, Any], device: torch.device) -> Callable[[Shard], CausalLM]:
    config = ModelConfig.from_dict(SHAPE | shape)
    return lambda shard: build(config, ShardWeights(device, shard), config.max_position_embeddings)


def answers(model: CausalLM, device: torch.device, kernels: str, deterministic: bool) -> list[Any]:
    options = EngineOptions.of(deterministic=deterministic, kernels=kernels, capture="never", max_num_seqs=8,
                               kv_blocks=128, enable_prefix_caching=False)
    llm = LLM.from_engine(engine_for(model, None, options, device=device, dtype=DTYPE))
    vocabulary = model.config.vocab_size
    prompts = [[(place * 31 + 7 * seed) % (11 + seed) * 5 % vocabulary for place in range(length)]
               for seed, length in enumerate(LENGTHS)]
    found: list[Any] = []
    for wish in WISHES:
        params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, temperature=0.8 * (seed % 2),
                                 logprobs=3) for seed in range(len(prompts))]
        for out in llm.generate(prompts, params, speculation=wish):
            if out.error is not None:
                raise out.error
            said = out.outputs[0]
            found.append((said.token_ids, [(entry.raw, entry.processed) for entry in said.logprobs or ()]))
    return found


def compare(name: str, device: torch.device, kernels: str, deterministic: bool) -> tuple[list[Row], list[str]]:
    make = builder(MODELS[name], device)
    expected = answers(make(WHOLE), device, kernels, deterministic)
    rows: list[Row] = []
    wrong: list[str] = []
    if deterministic and 2 * sum(len(set(tokens)) > 2 for tokens, _ in expected) < len(expected):
        wrong.append(f"{name}: texts are one token over and over, and equality means nothing")
    for size in SIZES:
        shared = together(size, make, lambda: select(deterministic, device, kernels), device)
        found = answers(shared, device, kernels, deterministic)
        bits = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
        texts = sum(ours[0] == theirs[0] for ours, theirs in zip(found, expected, strict=True))
        case = f"{name}, {size} ranks, {'deterministic' if deterministic else 'fast'}"
        rows.append(Row(case, "equal", bits, note=f"of {len(expected)} to the bit, {texts} by their tokens"))
        say(f"shards: {case}: {bits} of {len(expected)} to the bit, {texts} by their tokens")
        if deterministic and bits < len(expected):
            wrong.append(f"{case}: {len(expected) - bits} of {len(expected)} differ from one rank's")
    return rows, wrong


def step_time(model: CausalLM, kernels: Kernels, device: torch.device, batch: int, context: int, count: int) -> float:
    blocks = [batch * -(-(context + count) // 16) + 1] * len(model.cache_groups)
    storage = KVStorage(model.cache_groups, blocks, 16, DTYPE, device)
    layout = decode_step(device, batch, context, count)
    hidden = torch.randn(batch * count, model.config.hidden_size, dtype=DTYPE, device=device)

    def layers() -> None:
        model.layers(hidden.clone(), Forward(kernels, layout, storage.keys, storage.values, model.cache_groups))

    return microseconds([layers])


def times(name: str, device: torch.device) -> list[Row]:
    make = builder(MODELS[name], device)
    rows: list[Row] = []
    for deterministic in (True, False):
        kernels = select(deterministic, device, "triton")
        models = {size: make(WHOLE if size == 1 else Shard(Silent(size), deterministic)) for size in (1, *SIZES)}
        for batch, context, count in STEPS:
            found = {size: step_time(model, kernels, device, batch, context, count) for size, model in models.items()}
            case = f"{name}, {batch} x {count} after {context}, {'deterministic' if deterministic else 'fast'}"
            note = ", ".join(f"{took:.1f} us of 1 in {size}" for size, took in found.items())
            rows.append(Row(case, "us", found[1], {f"1 of {size}": found[size] for size in SIZES}, False, note))
            say(f"shards: {case}: {note}")
    return rows


@torch.inference_mode()
def run(device: torch.device, kernels: str = "triton", models: Sequence[str] = ()) -> dict[str, Any]:
    """`models`: of MODELS; none: all of them."""
    rows: list[Row] = []
    wrong: list[str] = []
    for name in models or MODELS:
        for deterministic in (True, False):
            compared, different = compare(name, device, kernels if deterministic or kernels == "triton" else "eager",
                                          deterministic)
            rows += compared
            wrong += different
    for name in TIMED if device.type == "cuda" else ():
        if models and name not in models:
            continue
        rows += times(name, device)
    return document(rows) | {"failures": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/shards.py", description=__doc__)
    parser.add_argument("--models", help=f"separated by commas, of {', '.join(MODELS)}; all where none are given")
    json_argument(parser)
    arguments = parser.parse_args()
    conclude(lambda: run(card(), models=arguments.models.split(",") if arguments.models else ()), arguments.json)


if __name__ == "__main__":
    main()
