"""`paceline generate`: batches, JSON, traces, streaming, and prompts that fail alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from paceline.cli.main import main
from paceline.cli.options import speculation
from paceline.errors import ConfigError
from paceline.sampling.trace import Trace
from paceline.speculation.stats import Provenance, SpeculationStats


def test_one_prompt_prints_only_its_text(fake_llm, capsys):
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == fake_llm.answer + "\n"


def test_several_prompts_are_one_batch(fake_llm, capsys):
    assert main(["generate", "one", "two", "--n", "2"]) == 0
    assert [prompts for prompts, _ in fake_llm.last.asked] == [["one", "two"]]
    out = capsys.readouterr().out
    assert out.count(fake_llm.answer) == 4
    assert "── two [1]" in out


def test_json_is_one_document(fake_llm, capsys):
    assert main(["generate", "one", "two", "--json", "--seed", "5"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in document["results"]] == ["one", "two"]
    first = document["results"][0]
    assert first["seed"] == 5
    assert first["outputs"][0]["token_ids"][0] == ord("P")
    assert first["outputs"][0]["finish_reason"] == "stop"
    assert {"metrics", "speculation", "prompt_token_ids", "error"} <= set(first)


def test_a_bad_prompt_fails_alone(fake_llm, capsys):
    assert main(["generate", "fine", "bad", "--json"]) == 2
    captured = capsys.readouterr()
    results = json.loads(captured.out)["results"]
    assert results[0]["error"] is None and results[0]["outputs"]
    assert "is bad" in results[1]["error"]
    assert captured.err.count("error:") == 1


def test_every_sampling_option_reaches_the_request(fake_llm):
    assert main([
        "generate", "x", "--max-tokens", "9", "--min-tokens", "2", "--temperature", "0.5", "--top-k", "4",
        "--top-p", "0.8", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2",
        "--frequency-penalty", "0.3", "--no-repeat-ngram-size", "3", "--bad-word", "foo", "--bad-word", "bar",
        "--stop", "END", "--stop-token-id", "17", "--ignore-eos", "--parse-special", "--seed", "1", "--timeout", "5",
        "--logprobs", "2", "--prompt-logprobs", "1",
    ]) == 0
    _, p = fake_llm.last.asked[0]
    assert (p.max_tokens, p.min_tokens, p.temperature, p.top_k, p.top_p, p.min_p) == (9, 2, 0.5, 4, 0.8, 0.1)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (p.no_repeat_ngram_size, p.bad_words, p.stop, p.stop_token_ids) == (3, ("foo", "bar"), ("END",), (17,))
    assert (p.ignore_eos, p.seed, p.timeout_s, p.logprobs, p.prompt_logprobs) == (True, 1, 5.0, 2, 1)
    assert p.parse_special


def test_engine_options_reach_the_engine(fake_llm):
    assert main(["generate", "x", "--deterministic", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64",
                 "--kv-dtype", "float16", "--quantization", "blocks", "--tensor-parallel-size", "2",
                 "--speculation", '{"method": "oracle", "tokens": [1]}']) == 0
    assert fake_llm.last.options == {
        "deterministic": True, "device": "cpu", "dtype": "float32", "max_model_len": 64, "kv_dtype": "float16",
        "quantization": "blocks", "tensor_parallel_size": 2,
        "speculation": {"method": "oracle", "tokens": [1]},
    }


def test_speculation_is_a_name_or_json():
    assert speculation(None) is None
    assert speculation("none") is None
    assert speculation("ngram") == "ngram"
    assert speculation('{"method": "ngram"}') == {"method": "ngram"}
    with pytest.raises(ConfigError, match="not valid JSON"):
        speculation("{oops")


def test_trace_is_written(fake_llm, tmp_path):
    target = tmp_path / "trace.json"
    assert main(["generate", "x", "--trace", str(target), "--seed", "5"]) == 0
    trace = Trace.from_json(target.read_text())
    assert (trace.seed, trace.params.seed) == (5, 5)


def test_trace_that_cannot_be_written_is_explained(fake_llm, tmp_path, capsys):
    assert main(["generate", "x", "--trace", str(tmp_path / "no" / "such" / "folder")]) == 2
    assert "choose another file" in capsys.readouterr().err


def test_trace_records_one_prompt(fake_llm, capsys):
    assert main(["generate", "x", "y", "--trace", "t.json"]) == 2
    assert "one prompt" in capsys.readouterr().err


def test_chat_wraps_prompts_as_messages(fake_llm, capsys):
    assert main(["generate", "one", "two", "--chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out.count(fake_llm.answer) == 2
    assert main(["generate", "one", "--system", "Be brief."]) == 2
    assert "--chat" in capsys.readouterr().err


def test_a_prompt_can_come_from_stdin(fake_llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-"]) == 0
    assert fake_llm.last.asked[0][0] == ["from a pipe"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_explained(errors, fake_llm, capsys, monkeypatch):
    """Which of the two Python does depends on the locale."""
    for command in (["generate", "-"], ["chat"]):
        stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(command) == 2
        assert "not utf-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--chat"]])
def test_on_a_terminal_one_prompt_streams(extra, fake_llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["generate", "hello", *extra]) == 0
    assert capsys.readouterr().out == fake_llm.answer + "\n"
    assert fake_llm.last.closed == 1


def test_speed_goes_to_stderr_and_the_text_alone_to_stdout(fake_llm, capsys, monkeypatch):
    stats = SpeculationStats("auto", cycles=2, plain=2, emitted=6, provenance=[
        Provenance("accepted", "ngram"), Provenance("plain"), Provenance("accepted", "dspark")])
    output = fake_llm._output
    monkeypatch.setattr(fake_llm, "_output", lambda *given: replace(output(*given), speculation=stats))
    assert main(["generate", "one"]) == 0
    captured = capsys.readouterr()
    assert captured.out == fake_llm.answer + "\n"
    assert f"{len(fake_llm.answer)} tokens" in captured.err and "tok/s" in captured.err
    assert "2.00 tokens a step (auto: dspark, ngram)" in captured.err
    assert main(["generate", "one", "--json"]) == 0
    assert "tok/s" not in capsys.readouterr().err


def test_json_is_one_line_unless_it_is_to_be_pretty(fake_llm, capsys):
    assert main(["generate", "one", "--json"]) == 0
    short = capsys.readouterr().out
    assert short.count("\n") == 1
    assert main(["generate", "one", "--json", "--pretty"]) == 0
    long = capsys.readouterr().out
    assert long.count("\n") > 10 and json.loads(long) == json.loads(short)
    assert main(["generate", "one", "--pretty"]) == 2
    assert "--json" in capsys.readouterr().err


def test_twins_are_told(fake_llm, capsys):
    assert main(["generate", "one", "-n", "2"]) == 0
    assert "same text" in capsys.readouterr().err
    assert main(["generate", "one", "-n", "2", "-t", "0.5"]) == 0
    assert "same text" not in capsys.readouterr().err
