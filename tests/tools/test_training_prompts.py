"""tools/training_prompts.py: prompts of all kinds in the shares that were asked for, the same each time."""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import prompt_kinds
import prompt_topics
import training_prompts
from paceline.training.prompts import read_prompts

BOOK = "\n\n".join(f"This is sentence {n} of a paragraph, and it is long. So is the next one, number {n}."
                   for n in range(400))
GERMAN = "".join(f"Im Jahr {n} kam der {n}. König in das Land. Er blieb dort sieben Jahre lang, und dann ging er.\n"
                 for n in range(90))
WORDNET = "  1 This software and database is being provided to you\n" + "\n".join([
    "09000001 18 n 02 Bach 0 Johann_Sebastian_Bach 0 001 @i 10120671 n 0000 | German composer (1685-1750)  ",
    "09000002 15 n 01 Leipzig 0 001 @i 08524735 n 0000 | a city in southeastern Germany  ",
    "09000003 15 n 01 Elsewhere 0 001 @i 08524735 n 0000 | nothing that is asked about  ",
    "09000004 05 n 02 otter 0 water_dog 1 001 @ 01447331 n 0000 | a freshwater carnivorous mammal  "])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    lines = [{"source": "a" if n else "b", "prompt": f"What is {n}?\u2028", "response": f"The number {n}. " * 20}
             for n in range(30)] + [{"source": "c", "prompt": f"Who is {n}?", "response": "Somebody or other. " * 9}
                                    for n in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    (tmp_path / "german.txt").write_text(GERMAN, encoding="utf-8")
    (tmp_path / "english.txt").write_text("compiler: A program that translates. " + "It is long. " * 30 + "\n")
    (tmp_path / "data.noun").write_text(every_kind(), encoding="utf-8")
    (tmp_path / "written.jsonl").write_text("".join(json.dumps(
        {"kind": "news", "topic": f"flood {n}", "prompt": f"Report on flood {n}.", "text": f"Water {n} came. " * 40}
    ) + "\n" for n in range(5)))
    return tmp_path


def every_kind() -> str:
    named = [f"0900001{place} {number} n 01 Name{kind} 0 001 @i 10120671 n 0000 | a city  "
             for place, (number, kind) in enumerate(prompt_topics.NAMED.items())]
    common = [f"0900002{place} {number} n 02 {kind} 0 other 0 001 @ 10120671 n 0000 | a device, disease, study  "
              for place, (number, kind) in enumerate(prompt_topics.COMMON.items())]
    return "\n".join([*named, *common])


def made(patch: pytest.MonkeyPatch, files: Path, *more: str) -> list[dict[str, Any]]:
    out = files / "out.jsonl.gz"
    patch.setattr(sys, "argv", ["prompts", "--prompts", str(files / "prompts.jsonl"), "--books",
                                str(files / "book.txt"), "--out", str(out), "--total", "100", *more])
    training_prompts.main()
    assert len(read_prompts([out])) > 40, "training reads them"
    with gzip.open(out, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def all_kinds(files: Path) -> list[str]:
    return ["--german", str(files / "german.txt"), "--passages", str(files / "english.txt"),
            str(files / "written.jsonl"), "--wordnet", str(files / "data.noun")]


def test_prompts_of_all_kinds_follow_from_the_seed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, files, *all_kinds(files), "--seed", "1")
    counts = {kind: sum(row["kind"] == kind for row in found) for kind in training_prompts.SHARES}
    for kind, share in training_prompts.SHARES.items():
        assert 50 * share <= counts[kind] <= 100 * share + 1, counts
    texts = {kind: [row["prompt"] for row in found if row["kind"] == kind and "prompt" in row] for kind in counts}
    assert sum("König" in one for one in texts["translate"]) >= 7
    assert any("Water" in one for one in texts["summarise"]) and any("compiler" in one for one in texts["answer"])
    assert made(monkeypatch, files, *all_kinds(files), "--seed", "1") == found
    assert made(monkeypatch, files, *all_kinds(files), "--seed", "2") != found


def test_small_collections_are_kept_whole(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, files)
    instructions = [row["prompt"] for row in found if row["kind"] == "instruction"]
    assert len(instructions) == 28 and "What is 0?\u2028" in instructions
    assert sum(one.startswith("Who") for one in instructions) == 9


def test_what_cannot_be_made_is_left_out(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch, files)
    assert {row["kind"] for row in found} == set(training_prompts.SHARES) - {"fact"}
    assert not any("German to English" in row.get("prompt", "") for row in found)


def test_conversations_end_with_a_question_that_goes_with_them() -> None:
    luck = random.Random(0)
    sums = [prompt_kinds.follow_up(luck, [("1 + 1?", "It is <<1+1=2>>2.\n#### 2")]) for _ in range(20)]
    for row in sums:
        asked, said, later = row["messages"]
        assert said == {"role": "assistant", "content": "It is 2.\nThe answer is 2"} and asked["role"] == "user"
        assert later["role"] == "user" and later["content"] in prompt_kinds.ABOUT_SUM
    code = prompt_kinds.follow_up(luck, [("a", "b"), ("add", "def add(a, b):\n    return a + b")])
    assert len(code["messages"]) == 5 and "{" not in code["messages"][-1]["content"]


def test_pieces_are_whole_sentences(files: Path) -> None:
    pieces = training_prompts.pieces(random.Random(0), GERMAN.strip().split("\n"))
    assert len(pieces) == len(set(pieces)) > 90
    assert all(piece[0].isupper() and piece[-1] == "." and not re.search(r"\d\.$", piece) for piece in pieces)


def test_excerpts_are_whole_sentences() -> None:
    luck = random.Random(3)
    for _ in range(200):
        part = prompt_kinds.excerpt(luck, BOOK, 60, 900)
        assert part.startswith(("This is", "So is")) and part.endswith(".") and 60 <= len(part) < 1000


def test_topics_are_read_from_wordnet(tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(WORDNET)
    found = prompt_topics.topics(tmp_path / "data.noun")
    assert {kind: names for kind, names in found.items() if names} == {
        "person": ["Johann Sebastian Bach"], "place": ["Leipzig"], "animal": ["otter"]}
    asked = {prompt_topics.ask(random.Random(seed), found, "animal", "otter") for seed in range(99)}
    assert "What does an otter eat?" in asked and len(asked) == len(prompt_topics.QUESTIONS["animal"])
