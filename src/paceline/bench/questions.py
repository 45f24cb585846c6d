"""Questions in Spec-Bench's form: a JSON object a line with question_id, category and turns. A few come along."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories that Spec-Bench reports as one, "mt_bench"."""
OWN_QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""Written for Paceline, a few of each of Spec-Bench's six kinds: for a look, not for figures to be compared."""


@dataclass(frozen=True)
class Question:
    id: str
    category: str
    """As the file has it."""
    group: str
    """As Spec-Bench reports it."""
    turns: tuple[str, ...]


def read_questions(path: str | Path) -> list[Question]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): give a file like Spec-Bench's question.jsonl.") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            category, turns = raw["category"], raw["turns"]
            if not isinstance(category, str) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise ValueError("category must be a text and turns a list of texts")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"Line {number} of {path} is not a question ({error}): it needs question_id, category "
                              "and turns, as JSON.") from None
        group = "mt_bench" if category in MT_BENCH else category
        questions.append(Question(str(raw.get("question_id", number)), category, group, tuple(turns)))
    if not questions:
        raise ConfigError(f"{path} has no questions.")
    return questions


def choose(questions: Sequence[Question], per_category: int | None = None, limit: int | None = None,
           categories: str | None = None) -> list[Question]:
    """The first `per_category` of each reported category, in the order of the file; of mt_bench the first of each of
    its eight parts, then the second, so that a few questions still show all of it. `categories` (reported or file's
    names, separated by commas) and then `limit` cut further; categories then take turns, so that a cut leaves some of
    each."""
    wanted = None if categories is None else {part.strip() for part in categories.split(",")}
    known = {name for question in questions for name in (question.category, question.group)}
    if wanted is not None and not wanted <= known:
        raise ConfigError(f"There is no category {min(wanted - known)!r}: use {', '.join(sorted(known))}.")
    for name, value in (("per-category", per_category), ("limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}.")
    groups: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        if wanted is None or question.category in wanted or question.group in wanted:
            groups.setdefault(question.group, {}).setdefault(question.category, []).append(question)
    chosen = [_in_turn(list(parts.values()))[:per_category] for parts in groups.values()]
    return _in_turn(chosen)[:limit]


def _in_turn(lists: Sequence[Sequence[Question]]) -> list[Question]:
    """The first of each, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [one[place] for place in range(longest) for one in lists if place < len(one)]
