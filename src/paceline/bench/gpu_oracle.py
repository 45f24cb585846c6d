"""Drafts that are right with a known chance, made on the device as a part of the step: what the engine makes of the
device's time for such steps, whoever drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.errors import ConfigError
from paceline.kernels.device.lookup import HIGHEST
from paceline.kernels.device.repeats import Drafts, RepeatInputs
from paceline.kernels.device.seats import SeatTables
from paceline.llm import LLM
from paceline.request import SamplingParams

REQUESTS = (1, 8, 32, 128)
CHANCES = (40, 60, 80)
"""Percent, of each token of a draft after those before it."""
DEPTH = 4
TOKENS = 200


class Oracle:
    """Implements DeviceDrafter. Every text is the same, and known; each seat has errors of its own."""

    def __init__(self, text: list[int], seats: int, vocab: int, chance: float, device: torch.device) -> None:
        right = torch.tensor(text, dtype=torch.int32).repeat(seats, 1)
        wrong = torch.rand(right.shape, generator=torch.Generator().manual_seed(7)) >= chance
        self._guesses = torch.where(wrong, (right + 1) % vocab, right).to(device)

    def propose(self, inputs: RepeatInputs, tables: SeatTables, drafts: Drafts) -> None:
        depth = min(DEPTH, drafts.tokens.shape[1])
        seats = inputs.seats.clamp(min=0)
        lengths = tables.lengths[seats].long()
        at = lengths[:, None] + torch.arange(depth, device=seats.device)
        drafts.tokens[:, :depth].copy_(self._guesses[seats[:, None], at.clamp(max=self._guesses.shape[1] - 1)])
        drafts.levels.fill_(HIGHEST)
        drafts.matched.fill_(1)
        drafts.found.copy_((inputs.ends - lengths).clamp(0, depth).where(inputs.seats >= 0, 0))


@dataclass(frozen=True, slots=True)
class Drafted:
    """Milliseconds a token, of each request."""

    taken: float
    device: float
    """In which the device ran its steps."""
    per_step: float
    """Tokens."""

    @property
    def over(self) -> float:
        """What a token took beyond the device's time, as a part of that."""
        return self.taken / self.device - 1


def measure(llm: LLM, prompt: list[int], vocab: int, requests: int, chance: float, runs: int = 2,
            count: int = TOKENS) -> Drafted:
    """Greedy texts of one prompt, so many at once; the fastest of some runs after one that captures."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    wish: dict[str, Any] = {"method": "ngram", "k": DEPTH, "adaptive": False}
    (plain,) = llm.generate(prompt, params, speculation=None)
    text = [*prompt, *plain.outputs[0].token_ids]
    found: list[Drafted] = []
    with told_by_an_oracle(llm, text, vocab, chance):
        for _ in range(1 + runs):
            outs = llm.generate([prompt] * requests, params, speculation=wish)
            assert all(out.outputs[0].token_ids == plain.outputs[0].token_ids for out in outs)
            told = [out.speculation for out in outs if out.speculation is not None]
            times = [out.metrics.token_times for out in outs]
            begin = max(own[0] for own in times)  # from here on nobody reads a prompt
            tokens = sum(at > begin for own in times for at in own) / requests
            # A step's time is shared out among its requests.
            device = sum(one.spent_s for one in told) / tokens
            found.append(Drafted((max(own[-1] for own in times) - begin) / tokens * 1000, device * 1000,
                                 sum(one.tokens_per_step for one in told) / len(told)))
    return min(found[1:], key=lambda one: one.taken)


@contextmanager
def told_by_an_oracle(llm: LLM, text: list[int], vocab: int, chance: float) -> Iterator[None]:
    """What would be looked up is told by an oracle meanwhile."""
    executor = llm.engine.executor
    if not isinstance(executor, GraphExecutor):
        raise ConfigError("Drafts that are part of a captured step are measured where steps are captured, and here "
                          "they are not: use a card, and capture other than never.")
    decode = executor.graphs.decode
    before = decode.drafter
    decode.release()
    decode.drafter = Oracle(text, decode.most_rows, vocab, chance, executor.graphs.device)
    try:
        yield
    finally:
        decode.release()
        decode.drafter = before
