"""The command line end to end: a question to the default model, and a trace of a tiny one that is replayed."""

from __future__ import annotations

import io
import json

import pytest
from serving import write_model

from paceline.cli.main import main


@pytest.mark.real_model
def test_the_built_in_question_is_answered_well(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_trace_replays_to_the_same_tokens(capsys, tmp_path):
    trace, model = tmp_path / "trace.json", str(write_model(tmp_path))
    sampled = ["--model", model, "--ignore-eos", "--max-tokens", "6", "--temperature", "0.8", "--seed", "7",
               "--deterministic"]
    assert main(["generate", "Once upon a time", *sampled, "--trace", str(trace), "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out)["results"][0]["outputs"][0]["token_ids"]
    assert len(tokens) == 6
    assert main(["replay", str(trace), "--model", model]) == 0
    assert "the same 6 tokens" in capsys.readouterr().out
