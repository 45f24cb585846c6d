"""The case `answers` of `bench cpu`: real questions, one at a time, greedy, each engine writing its own answers.

Paceline drafts by `auto` and decodes plainly, the peers do as they do, on the same prompts' token ids. Prompts come
once: no engine finds in a cache or in a drafter's memory what it has read or written in an earlier turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.cpu_peers import REST_S, ROOM, Peer
from paceline.bench.questions import OWN_QUESTIONS, Question, choose, read_questions
from paceline.bench.report import Row, say
from paceline.bench.spec import PLAIN, decode_time, prompt_of
from paceline.errors import ConfigError
from paceline.garbage import only_new_objects_are_collected
from paceline.llm import LLM
from paceline.request import SamplingParams

NAME = "answers"
AUTO = "auto"
PER_CATEGORY = 2
MOST = 128
"""Tokens of an answer."""
MOST_TURNS = 2
WARM_UP = 24
"""Tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    """With the one that ended it."""
    seconds: float
    """Of the whole, the prompt's among them."""
    decode_s: float
    """From the first token to the last."""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    answer: Callable[[list[int], int, str], Answer]
    """(prompt, tokens at most, turn) -> its answer. What was read and written in one turn is not known in another."""


@dataclass(frozen=True, slots=True)
class Turn:
    """All questions answered once by one contender."""

    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return sum(len(one.tokens) for one in self.answers)

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first of each answer."""
        return _rate(sum(len(one.tokens) - 1 for one in self.answers), sum(one.decode_s for one in self.answers))

    @property
    def rate(self) -> float:
        """Tokens a second, the prompts' time counted."""
        return _rate(self.tokens, sum(one.seconds for one in self.answers))


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def questions(dataset: str | Path | None, per_category: int | None = None) -> list[Question]:
    """`per_category`: of each category, 0 for all of them."""
    wanted = PER_CATEGORY if per_category is None else per_category
    return choose(read_questions(dataset or OWN_QUESTIONS), wanted or None)


def prompts_of(llm: LLM, asked: Sequence[Question]) -> list[list[int]]:
    """The first turn of each as token ids; too long ones are left out."""
    found = [_ids(llm, question.turns[0]) for question in asked]
    room = min(ROOM, llm.engine.model.config.context) - MOST
    fitting = [prompt for prompt in found if len(prompt) <= room]
    if len(fitting) < len(found):
        say(f"cpu: {NAME}: {len(found) - len(fitting)} of {len(found)} questions are left out, they have more than "
            f"{room} tokens")
    if not fitting:
        raise ConfigError(f"No question of --dataset has at most {room} tokens: give others.")
    return fitting


def _ids(llm: LLM, text: str) -> list[int]:
    prompt = prompt_of(llm, [{"role": "user", "content": text}])
    if isinstance(prompt, list):
        return prompt
    if llm.engine.tokenizer is None:
        raise ConfigError(f"The model has no tokenizer, so the case {NAME} cannot ask it anything: leave it out of "
                          "--cases.")
    return llm.engine.tokenizer.encode(prompt)


def paceline(llm: LLM, speculation: str | None) -> Contender:
    name = speculation or PLAIN

    def answer(prompt: list[int], most: int, turn: str) -> Answer:
        params = SamplingParams(max_tokens=most, temperature=0.0, cache_salt=f"{NAME} {name} {turn}")
        begin = time.perf_counter()
        out = llm.generate([prompt], params, speculation=speculation)[0]
        seconds = time.perf_counter() - begin
        if out.error is not None:
            raise out.error
        return Answer(tuple(out.outputs[0].token_ids), seconds, decode_time([out])[1])

    return Contender(name, answer)


def beside(peer: Peer, ends: frozenset[int]) -> Contender:
    """`ends`: tokens that end a text, for everybody."""
    return Contender(peer.name, lambda prompt, most, turn: clocked(peer.answer(prompt, most), most, ends))


def clocked(written: Iterator[int], most: int, ends: frozenset[int]) -> Answer:
    """The clock starts when this is called: whoever writes has prepared everything but the prompt."""
    tokens: list[int] = []
    begin = first = last = time.perf_counter()
    for token in written:
        last = time.perf_counter()
        first = last if not tokens else first
        tokens.append(token)
        if len(tokens) == most or token in ends:
            break
    return Answer(tuple(tokens), last - begin, last - first)


def measure(contenders: Sequence[Contender], prompts: Sequence[list[int]], repeats: int) -> dict[str, list[Turn]]:
    """contender -> its turns. They take turns question by question, and who begins rotates, so that whatever happens
    to the machine happens to all."""
    for one in contenders:
        one.answer(prompts[0], WARM_UP, "warm-up")
    found: dict[str, list[Turn]] = {one.name: [] for one in contenders}
    turns = min(repeats, MOST_TURNS)
    for turn in range(turns):
        answers: dict[str, list[Answer]] = {one.name: [] for one in contenders}
        with only_new_objects_are_collected():
            for number, prompt in enumerate(prompts):
                start = number % len(contenders)
                for one in (*contenders[start:], *contenders[:start]):
                    time.sleep(REST_S)
                    answers[one.name].append(one.answer(prompt, MOST, str(turn)))
                rates = ", ".join(f"{name} {Turn((own[-1],)).decode_rate:.4g}" for name, own in answers.items())
                say(f"cpu: {NAME}, run {turn + 1} of {turns}, {number + 1}/{len(prompts)} (tok/s): {rates}")
        for name, own in answers.items():
            found[name].append(Turn(tuple(own)))
    return found


def rows_of(found: dict[str, list[Turn]], equals: frozenset[str] | None = None) -> list[Row]:
    """Paceline's `auto` and Paceline decoding plainly, each beside the peers; the best turn of each counts."""
    texts = [[answer.tokens for answer in found[name][0].answers] for name in (AUTO, PLAIN)]
    same = sum(one == other for one, other in zip(*texts))
    lengths = ", ".join(f"{name} {turns[0].tokens}" for name, turns in found.items())
    note = (f"{len(texts[0])} questions, up to {MOST} tokens of each engine's own text ({lengths} in all); {same} of "
            f"{len(texts[0])} texts of {AUTO} are those of {PLAIN} decoding")
    rates: dict[str, Callable[[Turn], float]] = {NAME: lambda turn: turn.decode_rate,
                                                 f"{NAME}_whole": lambda turn: turn.rate}
    rows = []
    for case, rate in rates.items():
        best = {name: max(map(rate, turns)) for name, turns in found.items()}
        drafted, plain = best.pop(AUTO), best.pop(PLAIN)
        rows += [Row(case, "tok/s", drafted, best, note=note if case == NAME else "", equals=equals),
                 Row(f"{case}_{PLAIN}", "tok/s", plain, best, equals=equals)]
    return rows


def run(llm: LLM, peers: Sequence[Peer], prompts: Sequence[list[int]], repeats: int,
        equals: frozenset[str] | None = None) -> list[Row]:
    everybody = [paceline(llm, AUTO), paceline(llm, None), *(beside(peer, llm.engine.eos_ids) for peer in peers)]
    return rows_of(measure(everybody, prompts, repeats), equals)
