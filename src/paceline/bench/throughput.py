"""Many at once: output tokens a second with 1, 8 and 32 concurrent requests, transformers batched beside it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from paceline.bench.latency import prompt_of
from paceline.bench.peers import TransformersPeer, has_transformers
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.llm import LLM
from paceline.request import SamplingParams


def rate(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Output tokens a second, prefill included, from the first admission to the last token."""
    begin = time.perf_counter()
    llm.generate(list(prompts), SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True))
    return len(prompts) * new_tokens / (time.perf_counter() - begin)


def peer_rate(peer: TransformersPeer, prompts: list[list[int]], new_tokens: int) -> float:
    begin = time.perf_counter()
    peer.generate(prompts, new_tokens)
    return len(prompts) * new_tokens / (time.perf_counter() - begin)


def run(model: str | None = None, concurrency: tuple[int, ...] = (1, 8, 32), new_tokens: int = 64,
        prompt_tokens: int = 64, repeats: int = 2, peers: bool = True, kernels: str = "auto"
        ) -> dict[str, Any]:
    llm = LLM(model, enable_prefix_caching=False, kernels=kernels)
    vocab = llm.engine.model.config.vocab_size
    peer = TransformersPeer(model) if peers and has_transformers() else None
    best = {count: [0.0, 0.0] for count in concurrency}
    for turn in range(repeats):
        for count in concurrency:
            say(f"throughput: {count} at once, run {turn + 1} of {repeats}")
            prompts = [prompt_of(prompt_tokens, vocab, salt) for salt in range(count)]
            best[count][0] = max(best[count][0], rate(llm, prompts, new_tokens))
            if peer is not None:
                best[count][1] = max(best[count][1], peer_rate(peer, prompts, new_tokens))
    rows = [Row(f"concurrent_{count}", "tok/s", ours, {peer.name: theirs} if peer is not None else {})
            for count, (ours, theirs) in best.items()]
    if 1 in best:
        rows += [Row(f"gain_{count}", "x", ours / best[1][0], note="tokens/s of so many at once over one after another")
                 for count, (ours, _) in best.items() if count != 1]
    return document(rows, model=model or "default", kernels=llm.engine.kernels.name, new_tokens=new_tokens,
                    prompt_tokens=prompt_tokens, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.throughput", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated numbers of requests")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--kernels", default="auto", help="auto, native, eager or reference")
    json_argument(parser)
    arguments = parser.parse_args()
    counts = tuple(int(part) for part in arguments.concurrency.split(","))
    emit(run(arguments.model, counts, arguments.new_tokens, repeats=arguments.repeats,
             peers=not arguments.no_peers, kernels=arguments.kernels), arguments.json)


if __name__ == "__main__":
    main()
