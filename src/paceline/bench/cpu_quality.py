"""How near each engine of `bench cpu` is to the file's weights in float32 on a text, and so which of them give answers
as good as Paceline's: a faster engine with worse answers is no faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.bench.cpu_peers import MeasuredEngine, PeerUnavailable
from paceline.bench.report import Row, say
from paceline.measure.agreement import Best, judge
from paceline.measure.perplexity import BASELINE, Format, scorer, text_tokens
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve

TOKENS = 2048
WINDOW = 512
EQUAL = 2.0
"""A peer is as good if its KL is at most this many times Paceline's."""


@dataclass
class Qualities:
    """By engine: share of positions with the reference's best token, and mean KL over the reference's 20 best."""

    top1: dict[str, float] = field(default_factory=dict)
    kl: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """A line for each engine whose logits cannot be had."""

    def equals(self, name: str) -> frozenset[str]:
        """Those whose answers are as good as those of `name`."""
        return frozenset(who for who, kl in self.kl.items() if who != name and kl <= EQUAL * self.kl[name])

    def rows(self, name: str) -> list[Row]:
        """As rows beside the speeds, `name` being Paceline."""
        note = "; ".join(self.missing)
        top1 = {who: 100 * share for who, share in self.top1.items()}
        kl = dict(self.kl)
        return [Row("top1", "%", top1.pop(name), top1, note=note),
                Row("kl", "nats", kl.pop(name), kl, higher_is_better=False)]


class _Engine:
    """An engine as what judge() asks."""

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine

    def predictions(self, tokens: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield torch.from_numpy(self._engine.logits(tokens))[:-1], torch.tensor(tokens[1:])


def reference(model: str | None, text: str, threads: int) -> tuple[list[int], Best]:
    """The text's first tokens, and what the file's weights in float32 predict at each."""
    with open_checkpoint(resolve(model)) as checkpoint:
        tokens = text_tokens(checkpoint, text, TOKENS)
        say(f"cpu: {len(tokens)} tokens in float32, as the reference")
        return tokens, judge(scorer(Format(BASELINE), checkpoint, WINDOW, threads), tokens, WINDOW).best


def compare(engines: Sequence[MeasuredEngine], tokens: list[int], best: Best) -> Qualities:
    found = Qualities()
    for engine in engines:
        try:
            judged = judge(_Engine(engine), tokens, WINDOW, best)
        except PeerUnavailable as reason:
            found.missing.append(str(reason))
            continue
        found.top1[engine.name], found.kl[engine.name] = judged.top1, judged.kl
        say(f"cpu: {engine.name}: best token {100 * judged.top1:.1f} % the same, KL {judged.kl:.4f}")
    return found
