"""The engine on a CUDA card, with random weights in real shapes: time a token, time to the first token, throughput on
a mix of requests, what verifying several tokens of one request costs, how long the card waits for the host, what drafts
of a known quality bring, and what becomes of that under load."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from paceline.bench import gpu_load, gpu_oracle
from paceline.bench.gpu_breakdown import breakdown, verification_curve
from paceline.bench.gpu_host import REQUESTS, WAYS, host_gap
from paceline.bench.gpu_peers import measure
from paceline.bench.gpu_shapes import SHAPES, RandomDeviceWeights, cache_bytes, config_of, weight_bytes
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.config import EngineOptions
from paceline.engine.build import choose_device, engine_for
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.measure.kernel_time import bandwidth
from paceline.models.registry import build
from paceline.request import SamplingParams

BATCHES = (1, 8, 32, 128)
BREAKDOWN_ROWS = (1, 64)
"""A plain step and one that verifies many tokens of the same request."""
PROMPT = 512
CASES = ("tpot", "ttft", "mixed", "verify", "controls", "breakdown", "host", "oracle", "load")
CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "bias": {"temperature": 0.8, "logit_bias": {7: -2.0, 11: 3.0}},
    "logprobs": {"logprobs": 5},
    "no_repeat": {"no_repeat_ngram_size": 4},
}
"""Ways to sample, of all requests of a batch, and of one of them while the others are greedy."""
CONTROLLED = 8
VLLM = {
    "llama-3.1-8b": {"tpot_1": 4.96, "tpot_8": 5.12, "tpot_32": 5.89, "tpot_128": 8.64, "ttft_2048": 47.2,
                     "mixed": 8748.0},
    "smollm2-135m": {"tpot_1": 1.76, "tpot_8": 1.55, "tpot_32": 1.79, "tpot_128": 2.87, "ttft_2048": 13.1,
                     "mixed": 23182.0},
}
"""vLLM 0.26 on an H200 with the same shapes, prompts and counts, measured apart from this run; see docs/benchmarks.md.
Only there are they compared with."""


def engine(shape: str, dtype: torch.dtype, deterministic: bool, kv_dtype: str = "auto", max_num_seqs: int = 256) -> LLM:
    """An engine around random weights, for texts of up to 4,096 tokens."""
    device = choose_device("cuda")
    model = build(config_of(shape), RandomDeviceWeights(device, dtype), 4096)
    options = EngineOptions.of(deterministic=deterministic, max_model_len=4096, max_num_seqs=max_num_seqs,
                               enable_prefix_caching=False, kv_dtype=kv_dtype)
    return LLM.from_engine(engine_for(model, None, options, device=device, dtype=dtype, revision=shape))


def prompts_of(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(vocab) for _ in range(length)] for length in lengths]


def seconds(llm: LLM, prompts: list[list[int]], counts: list[int],
            controls: Sequence[dict[str, Any]] = ({},)) -> float:
    """`controls`: how the requests are sampled, in turn; greedily where nothing is said."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0, "seed": 1} | own)
              for count, own in zip(counts, itertools.cycle(controls))]
    torch.cuda.synchronize()
    started = time.perf_counter()
    llm.generate(list(prompts), params)
    return time.perf_counter() - started


def tpot(llm: LLM, vocab: int, batch: int, repeats: int, controls: Sequence[dict[str, Any]] = ({},)) -> float:
    """Milliseconds: (136 new tokens - 8 new tokens) / 128, the best of some runs."""
    best = float("inf")
    for turn in range(repeats + 1):  # the first one captures
        prompts = prompts_of([PROMPT] * batch, vocab, turn)
        short = seconds(llm, prompts, [8] * batch, controls)
        long = seconds(llm, prompts, [136] * batch, controls)
        if turn:
            best = min(best, (long - short) / 128 * 1000)
    return best


def ttft(llm: LLM, vocab: int, length: int, repeats: int) -> float:
    runs = []
    for turn in range(repeats + 4):
        runs.append(seconds(llm, prompts_of([length], vocab, 100 + turn), [1]))
        time.sleep(0.2)  # a card that has just run hot is slower
    return min(runs[2:]) * 1000


def mixed(llm: LLM, vocab: int, requests: int) -> float:
    """Output tokens a second of many requests, 32 to 1,024 tokens in and 32 to 512 out."""
    chance = random.Random(7)
    lengths = [chance.randint(32, 1024) for _ in range(requests)]
    counts = [chance.randint(32, 512) for _ in range(requests)]
    rates = [sum(counts) / seconds(llm, prompts_of(lengths, vocab, 9), counts) for _ in range(4)]
    say("gpu: mixed, run by run " + ", ".join(f"{rate:.0f}" for rate in rates) + " tok/s")
    return max(rates[2:])  # the first two compile and capture


def run(shape: str = "smollm2-135m", cases: tuple[str, ...] = CASES, dtype: str = "bfloat16",
        deterministic: bool = True, batches: tuple[int, ...] = BATCHES, repeats: int = 2, requests: int = 512,
        kv_dtype: str = "auto", peers: tuple[int, ...] = ()) -> dict[str, Any]:
    """`peers`: batches at which other engines are measured beside it, where they are importable."""
    wrong = [case for case in cases if case not in CASES]
    if wrong:
        raise ConfigError(f"No case {wrong[0]!r}: use some of {', '.join(CASES)}.")
    number = getattr(torch, dtype)
    config = config_of(shape)
    as_measured = dtype == "bfloat16" and kv_dtype == "auto"
    peer = VLLM.get(shape, {}) if as_measured and "H200" in torch.cuda.get_device_name() else {}
    rows: list[Row] = []
    beside = measure(shape, dtype, cases, peers, PROMPT) if peers else {}
    floor, speed = weight_bytes(config, number), bandwidth()

    def note(case: str, unit: str, value: float, higher: bool = False, text: str = "") -> None:
        say(f"gpu {shape}: {case} {value:.4g} {unit}")
        others = beside.get(case, {}) | ({"vLLM 0.26": peer[case]} if case in peer else {})
        rows.append(Row(case, unit, value, others, higher, text))

    started = time.perf_counter()
    llm = engine(shape, number, deterministic, kv_dtype)
    seconds(llm, prompts_of([8], config.vocab_size, 0), [4])
    note("start", "s", time.perf_counter() - started,
         text="random weights on the device, kernels compiled, one captured")
    if "tpot" in cases:
        for batch in batches:
            moved = floor + cache_bytes(config, number, batch * (PROMPT + 72))  # 72: half way through the output
            note(f"tpot_{batch}", "ms", tpot(llm, config.vocab_size, batch, repeats),
                 text=f"reads {moved / 1e9:.2f} GB of weights and caches, which take {moved / speed * 1e3:.2f} ms")
    if "ttft" in cases:
        note("ttft_2048", "ms", ttft(llm, config.vocab_size, 2048, repeats))
    if "mixed" in cases:
        note("mixed", "tok/s", mixed(llm, config.vocab_size, requests), higher=True)
    if "verify" in cases:
        for count, value in verification_curve(llm, PROMPT).items():
            note(f"verify_{count}", "ms", value)
    if "controls" in cases:
        alone: list[dict[str, Any]] = [{}] * (CONTROLLED - 1)
        for name, own in CONTROLS.items():
            note(f"{name}_{CONTROLLED}", "ms", tpot(llm, config.vocab_size, CONTROLLED, 1, [own]))
            if own:
                note(f"{name}_1_of_{CONTROLLED}", "ms", tpot(llm, config.vocab_size, CONTROLLED, 1, [own, *alone]))
    if "oracle" in cases:
        (prompt,) = prompts_of([PROMPT], config.vocab_size, 3)
        for chance in gpu_oracle.CHANCES:
            for count in gpu_oracle.REQUESTS:
                drafted = gpu_oracle.measure(llm, prompt, config.vocab_size, count, chance / 100)
                note(f"oracle_{chance}_{count}", "ms", drafted.taken,
                     text=f"a token, {drafted.per_step:.2f} tokens a step; the device took {drafted.device:.3f} ms, "
                          f"so {drafted.over:+.1%}")
    if "load" in cases:
        (prompt,) = prompts_of([PROMPT], config.vocab_size, 4)
        capacity, loads = gpu_load.sweep(llm, prompt, config.vocab_size)
        note("capacity", "requests/s", capacity, higher=True,
             text=f"plain, {gpu_load.CROWD} always there, {PROMPT} tokens in and {gpu_load.OUTPUT} out")
        for (load, way), served in loads.items():
            note(f"load_{load}_{way}", "requests/s", served.goodput, higher=True,
                 text=f"in time, of {served.rate:.2f}; first token {served.ttft * 1e3:.0f} ms, "
                      f"others {served.tpot * 1e3:.2f} ms (median)")
    if "breakdown" in cases:
        for count in BREAKDOWN_ROWS:
            for name, value in breakdown(llm, PROMPT, count).items():
                note(f"kernel {name} at {count}", "us", value)
    if "host" in cases:
        for way, count in itertools.product(WAYS, REQUESTS):
            note(f"host_{way}_{count}", "ms", host_gap(llm, way, count, PROMPT),
                 text="the card stood idle before each step")
    note("weights", "GB", floor / 1e9, text="read by every step")
    note("bandwidth", "TB/s", speed / 1e12, higher=True,
         text="read by a product of one row; what a step reads divided by it is the floor")
    return document(rows, shape=shape, dtype=dtype, deterministic=deterministic, kv_dtype=kv_dtype,
                    kernels=llm.engine.kernels.name, prompt=PROMPT, requests=requests)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.gpu", description=__doc__)
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated, of " + ", ".join(CASES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--peers", default="", metavar="BATCHES", help="other engines, so many requests at once")
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(arguments.shape, tuple(arguments.cases.split(",")), arguments.dtype, arguments.deterministic,
             tuple(map(int, arguments.batches.split(","))), arguments.repeats, arguments.requests,
             arguments.kv_dtype, tuple(int(batch) for batch in arguments.peers.split(",") if batch)), arguments.json)


if __name__ == "__main__":
    main()
