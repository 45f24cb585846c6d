"""tools/written_passages.py: what is asked for follows from numbers, and what is kept can be read."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prompt_topics
import training_prompts
import written_passages

TOPICS = {kind: [f"{kind} {n}" for n in range(9)] for kind in prompt_topics.QUESTIONS}
STORY = " ".join(f"River{n} rose by {n} feet near town{n}." for n in range(30))


class Writer:
    """An LLM that writes a story, goes round in circles, is silent, or fails, in turn; the last sentence never ends."""

    def __init__(self, model: str | None, **options: Any) -> None:
        assert options["max_num_seqs"] == 2 and options["heads"] == ()

    def chat(self, asked: list[Any], params: list[Any]) -> list[Any]:
        assert len({one.seed for one in params}) == len(asked) == len(params)
        texts = [(f"{STORY} And then the", None), ("The same. " * 90, None), ("", None), (STORY, "refused")]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=[1, 2])], error=error)
                for _, (text, error) in zip(asked, texts * len(asked))]


def test_what_is_kept_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(written_passages, "LLM", Writer)
    monkeypatch.setattr(written_passages, "topics", lambda path: TOPICS)
    out = tmp_path / "out.jsonl.gz"
    monkeypatch.setattr(sys, "argv", ["written", "--wordnet", "data.noun", "--count", "12", "--at-once", "2", "--out",
                                      str(out)])
    written_passages.main()
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).decode().splitlines()]
    assert [row["text"] for row in rows] == [STORY] * 3
    assert all(row["topic"] in row["prompt"] for row in rows)
    assert capsys.readouterr().out.splitlines()[-1].startswith("12 of 12: 3 kept")
    assert [one.topic for one in training_prompts.read_passages([out])] == [row["topic"] for row in rows]


def test_what_is_asked_follows_from_its_number() -> None:
    asked = [written_passages.asked(0, number, TOPICS) for number in range(60)]
    assert asked == [written_passages.asked(0, number, TOPICS) for number in range(60)]
    assert len(set(asked)) > 55 and asked[0] != written_passages.asked(1, 0, TOPICS)
    assert 15 < sum(one.kind == "news" for one in asked) < 45 and len({one.kind for one in asked}) > 8
