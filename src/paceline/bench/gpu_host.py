"""How long a card stands idle for the host before a step: of plain decoding, with drafts that the card looks up by
itself, and with drafts that the host proposes."""

from __future__ import annotations

import random
from typing import Any

from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.engine.execute.graphs.host_gaps import HostGaps, StepKind
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.request import SamplingParams

REQUESTS = (1, 8, 32)
WAYS: dict[str, tuple[dict[str, Any] | None, StepKind]] = {
    "plain": (None, StepKind.REPEATED),
    "ngram": ({"method": "ngram", "adaptive": False, "k": 4}, StepKind.DRAFTED),
    "suffix": ({"method": "suffix", "adaptive": False, "k": 4}, StepKind.VERIFIED),
}
"""What is asked for, and the kind of steps that it runs."""
FEW = 4
"""Different tokens in all texts, so that there is always something to draft."""


def host_gap(llm: LLM, way: str, requests: int, prompt: int = 512, tokens: int = 128) -> float:
    """Milliseconds a step, the median, with so many requests at once; each has a prompt and an output of so many
    tokens."""
    executor = llm.engine.executor
    if not isinstance(executor, GraphExecutor):
        raise ConfigError("How long a device waits for the host is measured where steps are captured, and here they "
                          "are not: use a card, and capture other than never.")
    chance = random.Random(11)
    prompts = [[chance.randrange(FEW) for _ in range(prompt)] for _ in range(requests)]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, allowed_token_ids=tuple(range(FEW)))
    wish, kind = WAYS[way]
    for _ in range(2):  # the first captures
        executor.host_gaps = HostGaps()
        llm.generate(prompts, params, speculation=wish)
    gap = executor.host_gaps[kind].median
    if gap is None:
        raise ConfigError(f"{tokens} tokens are too few to measure {way} steps: ask for more.")
    return gap * 1000
