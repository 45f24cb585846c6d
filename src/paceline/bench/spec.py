"""Speculation on Spec-Bench's questions: every method beside plain decoding, in one run.

The protocol is Spec-Bench's: one request at a time, both turns of a question as a conversation, speed-up as mean
tokens a second over plain decoding's mean, mean accepted tokens with the bonus counted. Plain decoding and the methods
take turns question by question, so that whatever happens to the machine happens to all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.questions import OWN_QUESTIONS, Question, choose, read_questions
from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.bench.spec_table import show
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM, Prompt
from paceline.request import RequestOutput, SamplingParams
from paceline.speculation.spec import BUILDERS, TOLD, heads_named, parse
from paceline.speculation.stats import SpeculationStats

PLAIN = "plain"
OVERALL = "overall"
WIDEST = 16
"""Letters of an option's value in the name of a column."""
MADE_OF: Mapping[str, dict[str, Any]] = {
    "specinfer": {"drafters": ["ngram", "suffix"]},
    "merge": {"drafters": ["ngram", "suffix"]},
    "cascade": {"drafter": "ngram", "by": "exit"},
}
"""What methods made of others are made of among "all": parts that need no files."""


@dataclass(frozen=True)
class Contender:
    """Plain decoding, or a method with its options."""

    name: str
    wish: dict[str, Any] | None


@dataclass
class Tally:
    """What one contender did on one category (or on all)."""

    rates: list[float] = field(default_factory=list)
    """Decode tokens a second, one figure per question."""
    tokens: int = 0
    stats: SpeculationStats = field(default_factory=lambda: SpeculationStats("all of them"))

    def add(self, tokens: int, seconds: float, stats: Sequence[SpeculationStats]) -> None:
        """One question: tokens after the first of each turn and the time they took."""
        if seconds > 0.0:
            self.rates.append(tokens / seconds)
        self.tokens += tokens
        for one in stats:
            self.stats.add(one)

    @property
    def rate(self) -> float:
        return sum(self.rates) / len(self.rates) if self.rates else 0.0


class Difference(PacelineError):
    """A method's tokens are not those of plain decoding."""

    def __init__(self, method: str, question: Question, turn: int, plain: list[int], drafted: list[int]) -> None:
        first = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), min(len(plain), len(drafted)))
        super().__init__(f"{method} differs from plain decoding at token {first} of question {question.id}, turn "
                         f"{turn + 1}.\nplain: {plain}\n{method}: {drafted}")
        self.plain, self.drafted = plain, drafted


def contenders(methods: str, options: Sequence[str] = ()) -> list[Contender]:
    """From --methods and --option: who should take part.

    `methods` is "all", names separated by commas, or a JSON object or list of them; an option is
    "method.key=value", the value read as JSON where it is JSON.
    """
    given = _options(options)
    wishes = [{"method": name} | MADE_OF.get(name, {}) for name in BUILDERS if name not in TOLD] \
        if methods == "all" else _listed(methods)
    named = {wish["method"] for wish in wishes}
    for method in given:
        if method not in named:
            raise ConfigError(f"--option names {method!r}, which is not among the methods: {', '.join(sorted(named))}.")
    found: list[Contender] = []
    for wish in wishes:
        wish |= given.get(wish["method"], {})
        parse(wish)
        found.append(Contender(_name(wish, found), wish))
    return found


def _name(wish: dict[str, Any], others: Sequence[Contender]) -> str:
    """A method's name, and where it is there already what this one has that the first has not."""
    first = next((one.wish for one in others if one.wish is not None and one.wish["method"] == wish["method"]), None)
    if first is None:
        return str(wish["method"])
    own = [f"{key}={text if len(text) <= WIDEST else f'{text[:WIDEST]}...'}" for key, text in
           ((key, json.dumps(value)) for key, value in wish.items() if first.get(key) != value)]
    own += [f"no {key}" for key in first if key not in wish]
    name = " ".join([wish["method"], *own])
    return name if all(one.name != name for one in others) else json.dumps(wish)


def _listed(text: str) -> list[dict[str, Any]]:
    if text.lstrip().startswith(("{", "[")):
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--methods is not valid JSON ({error}): write names separated by commas, or a JSON "
                              "object or list of objects.") from None
        wishes = raw if isinstance(raw, list) else [raw]
    else:
        wishes = [part.strip() for part in text.split(",")]
    out = [{"method": wish} if isinstance(wish, str) else wish for wish in wishes]
    for wish in out:
        if not isinstance(wish, dict) or not isinstance(wish.get("method"), str):
            raise ConfigError(f"--methods holds {wish!r}, which names no method.")
    return [dict(wish) for wish in out]


def _options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        method, dot, key = left.partition(".")
        if not (equals and dot and method and key):
            raise ConfigError(f"--option must look like method.key=value, got {text!r}.")
        try:
            found.setdefault(method, {})[key] = json.loads(value)
        except json.JSONDecodeError:
            found.setdefault(method, {})[key] = value
    return found


def admit(llm: LLM, wanted: Sequence[Contender], everyone: bool) -> tuple[list[Contender], dict[str, str]]:
    """Those the engine can build a drafter for. A method that was asked for by name must be one of them; of "all",
    the others are left out, with the reason."""
    admitted: list[Contender] = []
    left_out: dict[str, str] = {}
    for one in wanted:
        try:
            llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0), speculation=one.wish)
        except PacelineError as problem:
            if not everyone:
                raise
            left_out[one.name] = str(problem)
            continue
        admitted.append(one)
    return admitted, left_out


def run_question(llm: LLM, question: Question, one: Contender, params: Callable[[str], SamplingParams]
                 ) -> list[RequestOutput]:
    """Its turns as one conversation, each answered before the next is asked. What a method remembers of other
    requests it remembers of its own only: a text another contender has written would be an answer to copy."""
    conversation: list[dict[str, str]] = []
    outs: list[RequestOutput] = []
    for turn in question.turns:
        conversation.append({"role": "user", "content": turn})
        out = llm.generate([prompt_of(llm, conversation)], params(one.name), speculation=one.wish)[0]
        if out.error is not None:
            raise out.error
        outs.append(out)
        conversation.append({"role": "assistant", "content": out.outputs[0].text})
    return outs


def prompt_of(llm: LLM, conversation: Sequence[dict[str, str]]) -> Prompt:
    """Through the model's chat template, where it has one."""
    if llm.engine.chat is None:
        return "\n".join(message["content"] for message in conversation)
    return llm.render(list(conversation))


def decode_time(outs: Sequence[RequestOutput]) -> tuple[int, float]:
    """Tokens after the first of each turn, and their seconds."""
    times = [out.metrics.token_times for out in outs if len(out.metrics.token_times) > 1]
    return sum(len(one) - 1 for one in times), sum(one[-1] - one[0] for one in times)


def measure(llm: LLM, questions: Sequence[Question], methods: Sequence[Contender],
            params: Callable[[str], SamplingParams], check: bool) -> dict[str, dict[str, Tally]]:
    """contender -> category -> Tally, with OVERALL among the categories. Who starts rotates with the questions."""
    everyone = [Contender(PLAIN, None), *methods]
    tallies: dict[str, dict[str, Tally]] = {one.name: {} for one in everyone}
    for number, question in enumerate(questions):
        start = number % len(everyone)
        texts: dict[str, list[list[int]]] = {}
        said = []
        for one in everyone[start:] + everyone[:start]:
            outs = run_question(llm, question, one, params)
            texts[one.name] = [out.outputs[0].token_ids for out in outs]
            tokens, seconds = decode_time(outs)
            stats = [out.speculation for out in outs if out.speculation is not None]
            for failure in [each.failure for each in stats if each.failure]:
                say(f"spec: {one.name} was switched off on question {question.id}: {failure}")
            for category in (question.group, OVERALL):
                tallies[one.name].setdefault(category, Tally()).add(tokens, seconds, stats)
            said.append(f"{one.name} {tokens / seconds:.1f}" if seconds else one.name)
        say(f"spec: {number + 1}/{len(questions)} {question.group} (tok/s): {', '.join(said)}")
        for one in methods if check else ():
            for turn, (plain, drafted) in enumerate(zip(texts[PLAIN], texts[one.name])):
                if plain != drafted:
                    raise Difference(one.name, question, turn, plain, drafted)
    return tallies


def rows_of(tallies: dict[str, dict[str, Tally]]) -> list[dict[str, Any]]:
    """A row a method and category: its tokens a second, plain decoding as the peer, and how it came about."""
    rows = []
    for name, categories in tallies.items():
        if name == PLAIN:
            continue
        for category, tally in categories.items():
            row = Row(f"{name}/{category}", "tok/s", tally.rate, {PLAIN: tallies[PLAIN][category].rate}).as_dict()
            stats = tally.stats
            rows.append(row | {
                "method": name, "category": category, "mean_accepted_tokens": stats.mean_accepted_length,
                "tokens_per_step": stats.tokens_per_step, "acceptance_by_position": stats.acceptance_by_position,
                "questions": len(tally.rates), "tokens": tally.tokens, "draft_s": stats.draft_s})
    return rows


def run(dataset: str | Path, model: str | None = None, methods: str = "all", options: Sequence[str] = (),
        per_category: int | None = 10, limit: int | None = None, categories: str | None = None, max_tokens: int = 128,
        temperature: float = 0.0, seed: int = 0, check: bool = False, kernels: str = "auto",
        llm: LLM | None = None) -> dict[str, Any]:
    """The bench document. `llm`: an engine that is there already, instead of `model` and `kernels`."""
    questions = choose(read_questions(dataset), per_category, limit, categories)
    wanted = contenders(methods, options)
    llm = llm or LLM(model, kernels=kernels, heads=heads_named([one.wish for one in wanted]) or None)
    admitted, left_out = admit(llm, wanted, methods == "all")
    for name, reason in left_out.items():
        say(f"spec: {name} is left out: {reason}")
    if not admitted:
        raise ConfigError("None of the methods can run as asked: name some with --methods and --option.")

    def params(name: str) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, cache_salt=f"bench {name}")

    warm_up = Question("warm-up", "", "", (questions[0].turns[0],))
    for one in [Contender(PLAIN, None), *admitted]:
        run_question(llm, warm_up, one, lambda _: SamplingParams(max_tokens=24, temperature=0.0, cache_salt="warm-up"))
    tallies = measure(llm, questions, admitted, params, check)
    result = document([], model=model or "default", kernels=llm.engine.kernels.name, max_tokens=max_tokens,
                      temperature=temperature, per_category=per_category, questions=len(questions), checked=check,
                      methods={one.name: one.wish for one in admitted}, left_out=left_out)
    result["rows"] = rows_of(tallies)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.spec", description=__doc__)
    parser.add_argument("--dataset", default=str(OWN_QUESTIONS),
                        help="a JSON object a line: question_id, category, turns; default: a few that come along")
    parser.add_argument("--methods", default="all", help="all, names separated by commas, or JSON")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD.KEY=VALUE", help="repeatable")
    parser.add_argument("--model", default=None)
    parser.add_argument("--per-category", type=int, default=10, help="questions of each category; 0: all")
    parser.add_argument("--limit", type=int, default=None, help="questions in all, at most")
    parser.add_argument("--categories", default=None, help="only these, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--check", action="store_true", help="stop at the first token that differs from plain decoding")
    parser.add_argument("--kernels", default="auto", help="auto, native, eager or reference")
    parser.add_argument("--chart", default=None, metavar="FILE.png")
    json_argument(parser)
    given = parser.parse_args()
    try:
        if given.chart is not None:
            from paceline.bench.picture import ready

            ready(given.chart)
        result = run(given.dataset, given.model, given.methods, given.option, given.per_category or None, given.limit,
                     given.categories, given.max_tokens, given.temperature, check=given.check, kernels=given.kernels)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None
    finish(result, given.json, given.chart)


def finish(result: dict[str, Any], json_file: str | None, chart: str | None) -> None:
    """Table on stdout, JSON and picture where they were asked for."""
    if json_file == "-":
        emit(result, "-")
    else:
        show(result)
        if json_file is not None:
            Path(json_file).write_text(json.dumps(result, indent=2) + "\n")
    if chart is not None:
        from paceline.bench.spec_chart import draw

        draw(result, chart)
        say(f"spec: {chart} is written")


if __name__ == "__main__":
    main()
