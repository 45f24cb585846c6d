"""Single stream: decode and prefill tokens a second on the default model, transformers beside it in the same run."""

from __future__ import annotations

import argparse
import time
from typing import Any

from paceline.bench.peers import TransformersPeer, has_transformers
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.llm import LLM
from paceline.request import SamplingParams


def prompt_of(length: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Ordinary token ids, the same on every machine, different for each salt."""
    return [(i * 7919 + salt * 104729 + 1000) % (vocab_size - 1000) + 500 for i in range(length)]


def decode_rate(llm: LLM, prompt: list[int], new_tokens: int) -> float:
    """Tokens a second after the first token."""
    out = llm.generate([prompt], SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))[0]
    return float(out.metrics.decode_rate)


def prefill_rate(llm: LLM, prompt: list[int]) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    return len(prompt) / (time.perf_counter() - begin)


def peer_decode_rate(peer: TransformersPeer, prompt: list[int], new_tokens: int) -> float:
    """From two lengths, so that prefill and set-up cancel."""
    short = max(2, new_tokens // 8)
    begin = time.perf_counter()
    peer.generate([prompt], short)
    middle = time.perf_counter()
    peer.generate([prompt], new_tokens)
    return (new_tokens - short) / ((time.perf_counter() - middle) - (middle - begin))


def run(model: str | None = None, repeats: int = 3, new_tokens: int = 128, peers: bool = True,
        kernels: str = "auto") -> dict[str, Any]:
    llm = LLM(model, enable_prefix_caching=False, kernels=kernels)
    vocab = llm.engine.model.config.vocab_size
    peer = TransformersPeer(model) if peers and has_transformers() else None
    lengths = {"decode": 64, "prefill_512": 512, "prefill_2048": 2048}
    cases = {case: prompt_of(length, vocab) for case, length in lengths.items()}
    best: dict[str, list[float]] = {case: [0.0, 0.0] for case in cases}
    for turn in range(repeats):
        for case, prompt in cases.items():
            say(f"latency: {case}, run {turn + 1} of {repeats}")
            if case == "decode":
                best[case][0] = max(best[case][0], decode_rate(llm, prompt, new_tokens))
                if peer is not None:
                    best[case][1] = max(best[case][1], peer_decode_rate(peer, prompt, new_tokens))
            else:
                best[case][0] = max(best[case][0], prefill_rate(llm, prompt))
                if peer is not None:
                    best[case][1] = max(best[case][1], len(prompt) / peer.prefill_seconds(prompt))
    rows = [Row(case, "tok/s", ours, {peer.name: theirs} if peer is not None else {})
            for case, (ours, theirs) in best.items()]
    return document(rows, model=model or "default", kernels=llm.engine.kernels.name, repeats=repeats,
                    new_tokens=new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.latency", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--kernels", default="auto", help="auto, native, eager or reference")
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(arguments.model, arguments.repeats, peers=not arguments.no_peers,
             kernels=arguments.kernels), arguments.json)


if __name__ == "__main__":
    main()
