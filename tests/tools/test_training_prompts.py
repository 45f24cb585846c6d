"""tools/training_prompts.py: the prompts there are, and new ones that are the same each time."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

import training_prompts

BOOK = "\n\n".join(f"This is sentence {n} of a paragraph, and it is long. So is the next one, number {n}."
                   for n in range(400))


def prompts_of(patch: pytest.MonkeyPatch, folder: Path, name: str, seed: int) -> list[str]:
    given = folder / "prompts.jsonl"
    given.write_text("".join(json.dumps({"prompt": f"What is {n}?\u2028", "response": f"The number {n}. " * 6}) + "\n"
                             for n in range(9)), encoding="utf-8")
    (folder / "book.txt").write_text(BOOK, encoding="utf-8")
    out = folder / name
    patch.setattr(sys, "argv", ["prompts", "--prompts", str(given), "--books", str(folder / "book.txt"),
                                "--out", str(out), "--each", "5", "--seed", str(seed)])
    training_prompts.main()
    with gzip.open(out, "rt", encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in file]


def test_prompts_of_all_kinds_follow_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prompts_of(monkeypatch, tmp_path, "first.jsonl.gz", 1)
    assert found[:9] == [f"What is {n}?\u2028" for n in range(9)]
    new = found[9:]
    assert len(new) == 30 and all("sentence" in one or "number" in one for one in new)
    assert sum("What is" in one and len(one) > 200 for one in new) >= 10, "questions behind passages"
    assert sum(len(one) > 1000 for one in new) > 5, "long ones"
    assert prompts_of(monkeypatch, tmp_path, "again.jsonl.gz", 1) == found
    assert prompts_of(monkeypatch, tmp_path, "other.jsonl.gz", 2) != found
