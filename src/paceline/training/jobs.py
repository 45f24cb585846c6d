"""Which answers are made: each has a number, and everything about it follows from that number and the seed. So texts
can be made again instead of being moved, and a run that was broken off knows what is missing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import PacelineError, RequestError
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.training.prompts import Prompt, messages_of, plain_text

Encode = Callable[[Prompt], list[int]]


@dataclass(frozen=True)
class Job:
    index: int
    prompt: list[int]
    temperature: float
    seed: int


@dataclass
class Jobs:
    """All answers of one set of prompts: sample 0 of every prompt in a drawn order, then sample 1, and so on."""

    prompts: list[Prompt]
    encode: Encode
    seed: int
    temperatures: tuple[float, ...]
    longest: int
    """Tokens of a prompt; longer ones are left out."""
    order: np.ndarray = field(init=False)
    _encoded: dict[int, list[int] | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.order = np.random.default_rng([self.seed, len(self.prompts)]).permutation(len(self.prompts))

    def job(self, index: int) -> Job | None:
        """None: the prompt is too long, empty, or the chat template refuses it."""
        sample, place = divmod(index, len(self.prompts))
        prompt = int(self.order[place])
        if prompt not in self._encoded:
            self._encoded[prompt] = self._encode(self.prompts[prompt])
        ids = self._encoded[prompt]
        if ids is None:
            return None
        return Job(index, ids, self._temperature(sample, prompt), job_seed(self.seed, index))

    def _temperature(self, sample: int, prompt: int) -> float:
        """Each in turn, and once all had their turn only those that draw: a second greedy answer would be the first."""
        warm = tuple(value for value in self.temperatures if value > 0)
        turn = self.temperatures if sample < len(self.temperatures) or not warm else warm
        return turn[(sample + prompt) % len(turn)]

    def _encode(self, prompt: Prompt) -> list[int] | None:
        try:
            ids = self.encode(prompt)
        except PacelineError:
            return None
        return ids if 0 < len(ids) <= self.longest else None


def job_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "little")


def identity(llm: LLM) -> dict[str, str | None]:
    """Of a target: texts are of use to no other."""
    tokenizer = llm.engine.tokenizer
    return {"revision": llm.engine.revision, "tokenizer": None if tokenizer is None else tokenizer.fingerprint()}


def encoder(llm: LLM) -> Encode:
    """A prompt as the target sees it: through its chat template, or plainly where it has none."""
    engine = llm.engine
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("This model came without a tokenizer, so prompts cannot become its tokens: name another "
                           "one with --model.", "model")
    if engine.chat is not None and engine.chat.source is not None:
        return lambda prompt: llm.render(messages_of(prompt))
    return lambda prompt: tokenizer.encode(plain_text(prompt))


_MARK = "\u241ePROMPT\u241e"


def make_prompts(llm: LLM, count: int, seed: int, longest: int) -> list[str]:
    """Prompts that the target makes itself: what it writes where its chat template has the user's turn."""
    if llm.engine.chat is None or llm.engine.chat.source is None or llm.engine.tokenizer is None:
        raise RequestError("--self-made needs a model with a chat template, and this one has none: name files of "
                           "prompts with --data.", "self_made")
    before = llm.engine.chat.render([{"role": "user", "content": _MARK}]).split(_MARK)[0]
    start = llm.engine.tokenizer.encode(before, add_special=False, parse_special=True)
    params = [SamplingParams(max_tokens=min(longest, 160), temperature=1.0, top_p=0.95, seed=job_seed(seed, -1 - place))
              for place in range(count)]
    outputs = llm.generate([list(start) for _ in range(count)], params)
    texts = [output.outputs[0].text.strip() for output in outputs if output.error is None]
    return list(dict.fromkeys(text for text in texts if text))
