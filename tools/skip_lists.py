"""Which layers to leave out: acceptance and cost of some skip lists, for the drafter `skip`, on a model of your own.

Acceptance does not depend on the machine. The cost counted is the share of the layers that run, which is what a large
model's time follows; `seconds` is what this machine took for a draft token. Forecast: tokens a cycle over its cost in
steps of plain decoding, at the best depth, verification counted as one step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.speculation.stats import SpeculationStats

QUESTIONS = ("Explain why the sky is blue to a child.", "Write a short story about a lighthouse keeper.",
             "List five ways to save water at home.", "What is the difference between a virus and a bacterium?")
DEEPEST = 4


def candidates(layers: int) -> dict[str, list[int]]:
    """Lists worth trying, by name and percent of the layers between the first and the last: in the middle of them,
    spread over them, at their beginning and at their end."""
    found: dict[str, list[int]] = {}
    middle = layers - 2
    for percent in (10, 20, 30, 45):
        count = max(1, round(percent / 100 * middle))
        first = 1 + (middle - count) // 2
        found[f"inner_{percent}"] = list(range(first, first + count))
        found[f"spread_{percent}"] = sorted({1 + (2 * i + 1) * middle // (2 * count) for i in range(count)})
    part = max(1, round(0.2 * middle))
    found["early_20"] = list(range(1, 1 + part))
    found["late_20"] = list(range(layers - 1 - part, layers - 1))
    return found


def forecast(acceptance: Sequence[float], cost: float) -> float:
    """The best of (expected tokens of a cycle) / (1 + depth * cost) over all depths; acceptance[d] is the share of
    cycles in which the draft was right down to depth d + 1."""
    best, tokens = 0.0, 1.0
    for depth, rate in enumerate(acceptance, 1):
        tokens += rate
        best = max(best, tokens / (1.0 + depth * cost))
    return best


def measure(llm: LLM, lists: Mapping[str, list[int]], questions: Sequence[str] = QUESTIONS,
            max_tokens: int = 64) -> list[Row]:
    """One row a list, `paceline` the forecast speed-up, best first."""
    layers = llm.engine.model.config.num_layers
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    chats: list[list[Mapping[str, Any]]] = [[{"role": "user", "content": question}] for question in questions]
    prompts: list[Any] = [llm.render(chat) for chat in chats] if llm.engine.chat is not None else list(questions)
    rows = []
    for name, skip in lists.items():
        say(f"skip: {name}, {len(skip)} of {layers} layers")
        wish = {"method": "skip", "skip": skip, "k": DEEPEST, "adaptive": False}
        total = SpeculationStats("skip")
        for out in llm.generate(prompts, params, speculation=wish):
            total.add(out.speculation)
        rates = total.acceptance_by_position
        seconds = total.draft_s / max(1, total.drafted)
        cost = 1.0 - len(skip) / layers
        rows.append(Row(name, "x (forecast)", forecast(rates, cost), note=(
            f"layers {','.join(map(str, skip))}; cost {cost:.2f}; accepted to depth 1.. "
            f"{' '.join(f'{rate:.2f}' for rate in rates)}; {1e3 * seconds:.1f} ms a draft token")))
    return sorted(rows, key=lambda row: -row.paceline)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/skip_lists.py", description=__doc__)
    parser.add_argument("--model", help="folder, file or name; the default model if left out")
    parser.add_argument("--tokens", type=int, default=64)
    json_argument(parser)
    arguments = parser.parse_args()
    llm = LLM(arguments.model)
    rows = measure(llm, candidates(llm.engine.model.config.num_layers), max_tokens=arguments.tokens)
    emit(document(rows, model=arguments.model or "default", tokens=arguments.tokens), arguments.json)


if __name__ == "__main__":
    main()
