"""Every architecture on a card, with small random weights: the same text as on the CPU, and the equality matrix.

float32, TF32 off: the CPU's reference kernels write texts greedily; the card reads them, as the engine reads prompts,
and decodes them, with the captured steps that the architecture allows. `worst` is the largest difference of a token's
log-probability. Then, deterministic and in bfloat16, requests with drafts in a crowd, in chunks and preempted against
plain ones alone (matrix.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matrix import run
from paceline.bench.report import Row, document, json_argument, say
from paceline.engine.build import choose_device
from paceline.errors import ConfigError, PacelineError
from paceline.request import SamplingParams
from subjects import RandomSubject
from verdict import conclude

_ROPE: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7,
                         "mscale_all_dim": 0.7, "original_max_position_embeddings": 256}
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 64, "sliding_window": 24, "head_dim": 64,
                          "hidden_activation": "gelu_pytorch_tanh"}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 128,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "num_key_value_heads": 8, "q_lora_rank": 96, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "tie_word_embeddings": False, "rope_scaling": _ROPE}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 3, "rope_theta": 100000.0, "rope_local_base_freq": 10000.0},
    "phi3": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 1024},
    "olmo2": {},
    "gpt2": {"n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 1024, "activation_function": "gelu_new",
             "layer_norm_epsilon": 1e-5},
    "gpt_neox": {"num_key_value_heads": 8, "rotary_pct": 0.25, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
                 "use_parallel_residual": True, "tie_word_embeddings": False},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "deepseek_dense": {name: value for name, value in _LATENT.items() if name != "n_routed_experts"} | {
        "model_type": "deepseek_v2"},
    "deepseek_v3": _LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}
"""By model_type, where they do not name it: what differs from subjects.SHAPE. Without experts latent caches are read by
captured steps."""
DRAFTERS = ("ngram", "exit tree", "draft", "right tree", "plain")
LIMIT = 2e-3
"""Of a log-probability in float32: sums in another order."""


def compared(name: str, device: str, prompts: int, tokens: int, **changes: Any) -> Row:
    """The card's float32 against the CPU's."""
    shape = {"model_type": name} | SHAPES[name] | changes
    plain = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    there, here = (RandomSubject.small(where, "float32", **shape) for where in ("cpu", device))
    texts = [there.prompt(seed) for seed in range(prompts)]
    written = there.llm(kernels="reference").generate(texts, replace(plain, logprobs=0, prompt_logprobs=0))
    engine = here.llm(deterministic=False)
    decoded = engine.generate(texts, plain)
    read = engine.generate([text + list(out.outputs[0].token_ids) for text, out in zip(texts, written)],
                           replace(plain, max_tokens=1, prompt_logprobs=0))
    worst, equal = 0.0, 0
    for ours, again, card in zip(written, decoded, read):
        scores = _prompt_scores(ours) + [score.raw for score in ours.outputs[0].logprobs or []]
        worst = max([worst, *(abs(a - b) for a, b in zip(scores, _prompt_scores(card), strict=True))])
        equal += sum(a == b for a, b in zip(ours.outputs[0].token_ids, again.outputs[0].token_ids))
    total = sum(len(out.outputs[0].token_ids) for out in written)
    return Row(f"{name} / float32", "equal", equal, note=f"of {total} tokens, worst {worst:.1e}")


def _prompt_scores(out: Any) -> list[float]:
    return [score.raw for score in out.prompt_logprobs if score is not None]


def check(names: Sequence[str], device: str = "cuda", dtype: str = "bfloat16", *, prompts: int = 6, tokens: int = 24,
          circumstances: Sequence[str] = ("crowd", "chunks", "preempted"),
          drafters: Sequence[str] = DRAFTERS, **changes: Any) -> dict[str, Any]:
    """`changes`: to all shapes."""
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ConfigError(f"No architecture {unknown[0]!r}: use some of {', '.join(SHAPES)}.")
    rows: list[Row] = []
    failures: list[str] = []
    for name in names:
        try:
            row = compared(name, device, prompts, tokens, **changes)
            rows.append(row)
            if float(str(row.note).rsplit(" ", 1)[1]) > LIMIT:
                failures.append(f"{name}: {row.note}")
            subject = RandomSubject.small(device, dtype, **({"model_type": name} | SHAPES[name] | changes))
            matrix = run(subject, drafters, ("greedy", "seeded"), circumstances, tokens)
        except PacelineError as problem:
            failures.append(f"{name}: {problem}")
            continue
        wrong = len(matrix["differences"])
        total = sum(int(row["note"].removeprefix("of ").split(",")[0]) for row in matrix["rows"])
        rows.append(Row(f"{name} / {dtype} matrix", "equal", total - wrong, note=f"of {total} requests"))
        failures += [f"{name}: {one}" for one in matrix["differences"]]
        say(f"models: {name}: {rows[-2].paceline:.0f} {rows[-2].note}; {total - wrong} of {total} in the matrix")
    return document(rows, device=str(choose_device(device))) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/models.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default=",".join(SHAPES), help="separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the matrix")
    json_argument(parser)
    given = parser.parse_args()
    conclude(lambda: check(given.architectures.split(","), given.device, given.dtype), given.json)


if __name__ == "__main__":
    main()
