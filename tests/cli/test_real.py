"""The command line on the default model, end to end."""

from __future__ import annotations

import io
import json

import pytest

from paceline.cli.main import main

pytestmark = pytest.mark.real_model


def test_the_built_in_question_is_answered_well(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_trace_replays_to_the_same_tokens(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    sampled = ["--max-tokens", "6", "--temperature", "0.8", "--seed", "7", "--deterministic"]
    assert main(["generate", "Once upon a time", *sampled, "--trace", str(trace), "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["results"][0]["outputs"][0]["token_ids"]
    assert len(tokens) == 6
    assert main(["replay", str(trace)]) == 0
    assert "the same 6 tokens" in capsys.readouterr().out
