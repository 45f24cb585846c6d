"""How many drafted tokens are accepted, as papers report drafters: mean accepted tokens (the bonus counted) by category
of Spec-Bench, and acceptance position by position, greedy and sampled, with chains of several lengths and a tree.

Drafts are always as deep as they are asked to be (adaptive: false), and nothing is timed, so many questions share a
step: tokens are the same in any company. `python -m paceline.bench.acceptance` needs no terminal libraries.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.acceptance_table import markdown
from paceline.bench.long_prompts import behind
from paceline.bench.questions import Question, choose, read_questions
from paceline.bench.report import document, json_argument, say
from paceline.bench.spec import OVERALL, Contender, admit, contenders, prompt_of
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.measure.text_files import read_text
from paceline.request import SamplingParams
from paceline.speculation.spec import HEADS, heads_named
from paceline.speculation.stats import SpeculationStats

LOADED = "heads"
"""In place of methods: every trained head that the engine has."""
DEPTHS = (3, 5, 7)
NODES = 60
"""Of a tree: as many as EAGLE-2's have."""
OWN_SHAPE = frozenset({"k", "tree", "branches", "choices"})
"""A method that names one of these is measured as it is."""


@dataclass(frozen=True)
class Setting:
    """One way to draft and to verify, at one temperature."""

    method: str
    draft: str
    """What its drafts look like, in short."""
    temperature: float
    wish: dict[str, Any]

    @property
    def name(self) -> str:
        parts = (self.method, self.draft, f"t{self.temperature:g}", self.wish["verify"])
        return " ".join(part for part in parts if part)

    @property
    def salt(self) -> str:
        """Methods that remember texts must not find those of another setting. Heads remember nothing, and share what
        the prefix cache has of long prompts."""
        return "" if self.wish["method"] in HEADS else self.name


@dataclass
class Outcome:
    """What one setting did."""

    stats: dict[str, SpeculationStats] = field(default_factory=dict)
    """By category, OVERALL among them."""
    texts: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """By question and turn."""


def settings_of(wanted: Sequence[Contender], depths: Sequence[int], nodes: int,
                temperatures: Sequence[float]) -> list[Setting]:
    """Chains of every depth and, with `nodes`, a tree as deep as the deepest of them. Where tokens are sampled, chains
    are verified by rejection too; a greedy draft stands or falls alike under both rules."""
    chains = {f"K={depth}": {"k": depth} for depth in depths}
    trees = {f"tree of {nodes}": {"tree": True, "k": max(depths), "nodes": nodes}} if nodes else {}
    found: list[Setting] = []
    for temperature in temperatures:
        for one in wanted:
            assert one.wish is not None
            shapes: dict[str, dict[str, Any]] = {"": {}} if OWN_SHAPE & one.wish.keys() else chains | trees
            for draft, shape in shapes.items():
                for rule in ("coupled", "rejection") if temperature and draft in chains else ("coupled",):
                    wish = {"verify": rule} | shape | one.wish | {"adaptive": False}
                    if all((wish, temperature) != (other.wish, other.temperature) for other in found):
                        found.append(Setting(one.name, draft, temperature, wish))
    return found


def loaded_heads(llm: LLM) -> list[Contender]:
    heads = {name: head.config.kind for name, head in llm.engine.heads.heads.items()}
    if not heads:
        raise ConfigError("No trained head is loaded: name one with --head (on a card also the one that comes with "
                          "Paceline), or name --methods.")
    return contenders(json.dumps([{"method": kind, "head": name} for name, kind in heads.items()]))


def measure(llm: LLM, questions: Sequence[Question], one: Setting, max_tokens: int, at_once: int) -> Outcome:
    """All turns of every question, each a conversation, so many at once."""
    out = Outcome()
    for start in range(0, len(questions), at_once):
        batch = questions[start:start + at_once]
        conversations: list[list[dict[str, str]]] = [[] for _ in batch]
        for turn in range(max(len(question.turns) for question in batch)):
            asked = [place for place, question in enumerate(batch) if turn < len(question.turns)]
            for place in asked:
                conversations[place].append({"role": "user", "content": batch[place].turns[turn]})
            params = [SamplingParams(max_tokens=max_tokens, temperature=one.temperature, seed=start + place,
                                     cache_salt=one.salt) for place in asked]
            answers = llm.generate([prompt_of(llm, conversations[place]) for place in asked], params,
                                   speculation=one.wish)
            for place, answer in zip(asked, answers):
                if answer.error is not None:
                    raise answer.error
                assert answer.speculation is not None  # every request has a drafter
                if answer.speculation.failure:
                    say(f"acceptance: {one.name} was switched off on question {batch[place].id}: "
                        f"{answer.speculation.failure}")
                for category in (batch[place].group, OVERALL):
                    out.stats.setdefault(category, SpeculationStats(one.name)).add(answer.speculation)
                out.texts[batch[place].id, turn] = tuple(answer.outputs[0].token_ids)
                conversations[place].append({"role": "assistant", "content": answer.outputs[0].text})
        say(f"acceptance: {one.name}: {start + len(batch)}/{len(questions)} questions, "
            f"{out.stats[OVERALL].mean_accepted_length:.2f} tokens a draft")
    return out


def rows_of(one: Setting, context: int, outcome: Outcome) -> list[dict[str, Any]]:
    return [{"method": one.method, "draft": one.draft, "verify": one.wish["verify"], "temperature": one.temperature,
             "context": context, "category": category, "mean_accepted_tokens": stats.mean_accepted_length,
             "tokens_per_step": stats.tokens_per_step, "conditional_acceptance": stats.conditional_acceptance,
             "reached": list(stats.reached_by_depth), "drafts": stats.cycles, "drafted": stats.drafted,
             "accepted": stats.accepted} for category, stats in outcome.stats.items()]


def run(dataset: str | Path, model: str | None = None, methods: str = LOADED, options: Sequence[str] = (),
        heads: Sequence[str] = (), depths: Sequence[int] = DEPTHS, nodes: int = NODES,
        temperatures: Sequence[float] = (0.0, 1.0), contexts: Sequence[int] = (0,), text: str | None = None,
        per_category: int | None = 10, limit: int | None = None, categories: str | None = None, max_tokens: int = 128,
        at_once: int = 32, device: str = "auto", kernels: str = "auto", llm: LLM | None = None) -> dict[str, Any]:
    """The bench document. A context of 0: the questions as they are; else behind so many tokens of `text`. `llm`: an
    engine that is there already, instead of `model`, `heads`, `device` and `kernels`."""
    check(contexts, text)
    questions = choose(read_questions(dataset), per_category, limit, categories)
    wanted = [] if methods == LOADED else contenders(methods, options)
    if llm is None:
        named = [*heads, *heads_named([one.wish for one in wanted])]
        # Every draft has room in one step, so that none is cut short.
        llm = LLM(model, device=device, kernels=kernels, heads=named or None,
                  max_batch_tokens=max(2048, at_once * (1 + max(nodes, *depths))))
    wanted = wanted or loaded_heads(llm)
    every = settings_of(wanted, depths, nodes, temperatures)
    left_out = admit(llm, [Contender(one.name, one.wish) for one in every], everyone=True)[1]
    for name, reason in left_out.items():
        say(f"acceptance: {name} is left out: {reason}")
    every = [one for one in every if one.name not in left_out]
    if not every:
        raise ConfigError("None of the methods can run as asked: name some with --methods and --option.")
    result = document([], model=model or "default", kernels=llm.engine.kernels.name, max_tokens=max_tokens,
                      questions=len(questions), per_category=per_category, at_once=at_once, left_out=left_out)
    differences = 0
    for context in contexts:
        asked = questions if not context else behind(llm, questions, text or "", context, max_tokens)
        expected: dict[float, Outcome] = {}
        for number, one in enumerate(every):
            say(f"acceptance: {number + 1}/{len(every)} {one.name}" + (f" behind {context} tokens" if context else ""))
            outcome = measure(llm, asked, one, max_tokens, at_once)
            result["rows"] += rows_of(one, context, outcome)
            if one.wish["verify"] == "coupled":
                texts = expected.setdefault(one.temperature, outcome).texts
                differences += sum(outcome.texts.get(place) != tokens for place, tokens in texts.items())
    if differences:
        say(f"acceptance: {differences} texts differ from those of the first draft at their temperature")
    return result | {"differences": differences}


def check(contexts: Sequence[int], text: str | None) -> None:
    """What can be known before a model is loaded."""
    if text is not None:
        read_text(text)
    elif any(contexts):
        raise ConfigError("--context asks questions behind a text: give one with --text.")


def finish(result: dict[str, Any], json_file: str | None) -> None:
    """Tables on stdout, or JSON with "-"; JSON to a file as well."""
    written = json.dumps(result, indent=2)
    print(written if json_file == "-" else markdown(result))
    if json_file not in (None, "-"):
        Path(str(json_file)).write_text(written + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.acceptance", description=__doc__)
    parser.add_argument("--dataset", required=True, help="a JSON object a line: question_id, category, turns")
    parser.add_argument("--model", default=None)
    parser.add_argument("--methods", default=LOADED, help="heads (all that are loaded), names, or JSON")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD.KEY=VALUE", help="repeatable")
    parser.add_argument("--head", action="append", default=[], help="folder or name of a trained head; repeatable")
    parser.add_argument("--depths", default=_joined(DEPTHS), help="tokens of a chain")
    parser.add_argument("--nodes", type=int, default=NODES, help="tokens of a tree; 0: no trees")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--context", default="0", help="tokens of a prompt; 0: the questions as they are")
    parser.add_argument("--text", default=None, help="what questions are asked behind: UTF-8, plain or .gz")
    parser.add_argument("--per-category", type=int, default=10, help="questions of each category; 0: all")
    parser.add_argument("--limit", type=int, default=None, help="questions in all, at most")
    parser.add_argument("--categories", default=None, help="only these, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=32, help="questions")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto")
    json_argument(parser)
    given = parser.parse_args()
    try:
        finish(run(given.dataset, given.model, given.methods, given.option, given.head, _numbers(given.depths),
                   given.nodes, tuple(map(float, given.temperatures.split(","))), _numbers(given.context), given.text,
                   given.per_category or None, given.limit, given.categories, given.max_tokens, given.at_once,
                   given.device, given.kernels), given.json)
    except PacelineError as problem:
        raise SystemExit(f"error: {problem}") from None


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
