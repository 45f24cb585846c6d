"""Acceptance on a user's own prompts: the drafters at hand answer them, and the engine's statistics say what stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.plan.drafters import METHODS, Drafter
from paceline.plan.find import find_drafter
from paceline.plan.shape import ModelShape
from paceline.plan.speculation import acceptance_of
from paceline.plan.trained import drafter_of

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models.heads.config import HeadConfig

K = 7
MAX_TOKENS = 128
LOOKUPS = ("ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Accepted:
    drafter: str
    acceptance: float
    """By which every step with a draft of K would give as many tokens as there were: steps in which nothing was drafted
    count, so that look-ups are not praised for the few times they find something."""
    conditional: float
    """Share of drafted tokens that stood where all before them did."""
    tokens_per_step: float
    prompts: int
    tokens: int

    @property
    def source(self) -> str:
        return (f"measured: {self.tokens_per_step:.2f} tokens a step over {self.tokens} tokens of {self.prompts} "
                "prompts")


def at_hand(llm: LLM) -> list[str]:
    """Look-ups, and the trained heads that the engine has: by their kinds, where there is one of the kind."""
    kinds = {name: config.kind for name, config in _configs(llm).items()}
    return [*LOOKUPS, *(kind if list(kinds.values()).count(kind) == 1 else name for name, kind in kinds.items())]


def drafter_at_hand(llm: LLM, drafter: str, target: ModelShape) -> Drafter:
    """With the shape of the head that is loaded, where it is one."""
    head = _loaded(llm, drafter)
    return find_drafter(drafter, target) if head is None else drafter_of(drafter, _configs(llm)[head], target)


def wish(llm: LLM, drafter: str, k: int = K) -> dict[str, Any]:
    """What the engine is asked for to have this drafter, always K deep."""
    found: dict[str, Any] = {"method": drafter, "k": k, "adaptive": False}
    if (head := _loaded(llm, drafter)) is not None:
        return found | {"method": _configs(llm)[head].kind, "head": head}
    _, _, model = drafter.partition(":")
    if model:
        return found | {"method": "draft", "model": model}
    from paceline.speculation.spec import HEADS

    if drafter in HEADS or drafter not in METHODS:
        raise ConfigError(f"--prompts: no {drafter} head of this model is here: name one with --head, or leave "
                          f"--drafter {drafter} out; at hand are {', '.join(at_hand(llm))}, and draft:MODEL.")
    return found


def _configs(llm: LLM) -> dict[str, HeadConfig]:
    """Of the engine's trained heads, by their names."""
    return {name: head.config for name, head in llm.engine.heads.heads.items()}


def _loaded(llm: LLM, drafter: str) -> str | None:
    """The name of the head that a user calls so: by that, or by its kind (the last one of it)."""
    configs = _configs(llm)
    of_kind = [name for name, config in configs.items() if config.kind == drafter]
    return drafter if drafter in configs else next(reversed(of_kind), None)


def read(path: Path) -> list[Any]:
    """A file of prompts: .jsonl with "prompt" or "messages" in each line, or paragraphs of text."""
    from paceline.training.prompts import read_prompts

    return read_prompts([path])


def acceptance(llm: LLM, drafters: Sequence[str], prompts: Sequence[Any], max_tokens: int = MAX_TOKENS, k: int = K
               ) -> list[Accepted]:
    """Greedy answers. A drafter that remembers texts does not find those of another one."""
    from paceline.bench.spec import prompt_of
    from paceline.request import SamplingParams
    from paceline.speculation.stats import SpeculationStats
    from paceline.training.prompts import messages_of

    wishes = {drafter: wish(llm, drafter, k) for drafter in drafters}
    asked = [prompt_of(llm, [dict(turn) for turn in messages_of(prompt)]) for prompt in prompts]
    out = []
    for drafter, own in wishes.items():
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, cache_salt=drafter)
        total = SpeculationStats(drafter)
        for answer in llm.generate(asked, params, speculation=own):
            if answer.error is not None:
                raise answer.error
            if answer.speculation is not None:
                total.add(answer.speculation)
        reached = sum(total.reached_by_depth)
        # A head that drafts fewer tokens than it is asked for is not wrong about the rest.
        head = _loaded(llm, drafter)
        deep = min(k, (None if head is None else _configs(llm)[head].depth) or k)
        out.append(Accepted(drafter, acceptance_of(total.tokens_per_step, deep), sum(total.by_depth) / max(1, reached),
                            total.tokens_per_step, len(asked), total.emitted + total.plain))
    return out
