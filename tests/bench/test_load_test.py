"""bench serve: load tests of a server that is not ours, of a tiny one of ours, and what goes wrong."""

from __future__ import annotations

import json
import socket
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from serving import ServerThread, write_model

from bench.stub_server import Stub
from paceline.bench.serving import load_test
from paceline.bench.serving.load_test import Progress
from paceline.cli.main import main

STANDARD = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options", "seed"}


def bench(url: str, target: Path, *options: str) -> dict[str, float]:
    """Figures by name."""
    assert main(["bench", "serve", "--url", url, "--json", str(target), *options]) == 0
    return figures(target)


def figures(target: Path) -> dict[str, float]:
    return {row["case"]: row["paceline"] for row in json.loads(target.read_text())["rows"]}


def test_a_server_that_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, html = tmp_path / "out.json", tmp_path / "out.html"
    with Stub(key="secret") as stub:
        found = bench(f"{stub.url}/v1/", target, "--api-key", "secret", "--rate", "60,120", "--requests", "12",
                      "--slo", "ttft=30,tpot=30", "--warmup", "2", "--html", str(html), "--input-len", "3-9")
    assert len(stub.bodies) == 2 + 2 * 12 and set(stub.paths) == {"/v1/completions"}
    assert all(set(body) <= STANDARD and body["model"] == "stub-model" for body in stub.bodies)
    assert all(3 <= len(body["prompt"].split()) <= 9 for body in stub.bodies)
    assert len({body["prompt"] for body in stub.bodies}) == len(stub.bodies), "no level meets another's prompts"
    for level in ("poisson_60", "poisson_120"):
        assert found[f"{level}_completed"] == 12 and found[f"{level}_failed"] == 0
        assert found[f"{level}_slo_share"] == 1.0 and found[f"{level}_goodput"] == found[f"{level}_request_rate"]
        assert found[f"{level}_output_tokens_mean"] == 5 and found[f"{level}_cache_hits"] == pytest.approx(0.4)
        assert 0 < found[f"{level}_ttft_p50"] <= found[f"{level}_e2e_p50"]
        assert f"{level}_acceptance" not in found, "it does not tell"
    result = json.loads(target.read_text())
    assert "secret" not in target.read_text() + html.read_text()
    assert [level["requests"] for level in result["levels"]] == [12, 12]
    row = next(row for row in result["rows"] if row["case"] == "poisson_60_output_rate")
    assert row["interval"][0] <= row["paceline"] <= row["interval"][1] and row["better"] == "higher"
    page = ElementTree.fromstring(html.read_text().removeprefix("<!doctype html>"))
    assert len([one for one in page.iter() if one.tag.endswith("svg")]) == 6 + 4 + 2
    assert not any("src" in one.attrib or "href" in one.attrib for one in page.iter()), "one file, no network"
    out = capsys.readouterr()
    assert "poisson_120" in out.out and "12 done, 0 failed" in out.err


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with Stub() as stub:
        bench(stub.url, tmp_path / "out.json", "--concurrency", "1,2", "--requests", "3", "--warmup", "0", "--chart",
              str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--chart", "/no/such/folder/x.png"]) == 2
    assert "folder does not exist" in capsys.readouterr().err


def test_a_closed_loop_has_so_many_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=30)
    with Stub(answer=lambda place, body: (together.wait(), None)[1]) as stub:
        found = bench(stub.url, tmp_path / "out.json", "--concurrency", "3", "--requests", "6", "--warmup", "0")
    assert found["closed_3_completed"] == 6 and stub.most_at_once == 3


def test_an_open_loop_waits_for_nobody(tmp_path: Path) -> None:
    together = threading.Barrier(7, timeout=30)
    with Stub(answer=lambda place, body: (together.wait(), None)[1]) as stub:
        found = bench(stub.url, tmp_path / "out.json", "--arrivals", "burst", "--requests", "7", "--warmup", "0")
    assert found["burst_completed"] == 7 and stub.most_at_once == 7


def test_a_trace_decides_times_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 1000 + 50 * place, "input_length": 4 + place,
                                         "output_length": 2 + place}) + "\n" for place in range(3)))
    with Stub(usage=False, chunked=False) as stub:
        found = bench(stub.url, tmp_path / "out.json", "--trace", str(trace), "--time-scale", "0.001", "--no-usage",
                      "--warmup", "0", "--model", "named", "--temperature", "0.5", "--extra-body", '{"top_p": 0.9}')
    bodies = sorted(stub.bodies, key=lambda body: body["max_tokens"])
    assert [(len(body["prompt"].split()), body["max_tokens"]) for body in bodies] == [(4, 2), (5, 3), (6, 4)]
    assert all(body["model"] == "named" and body["top_p"] == 0.9 and "seed" in body for body in bodies)
    assert not any("stream_options" in body for body in bodies)
    assert found["trace_output_tokens_mean"] == 3, "events are counted where the server counts no tokens"
    samples = json.loads((tmp_path / "out.json").read_text())["levels"][0]["samples"]
    assert max(sample[0] for sample in samples) >= 95, "milliseconds; late perhaps, never early"


def test_files_ask_what_is_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, mixed = tmp_path / "question.jsonl", tmp_path / "mixed.jsonl"
    questions.write_text("".join(json.dumps({"question_id": place, "category": "qa", "turns": [f"q{place}", "more"]})
                                 + "\n" for place in range(3)))
    mixed.write_text('{"prompt": "a", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with Stub() as stub:
        bench(stub.url, tmp_path / "a.json", "--dataset", str(questions), "--requests", "3", "--warmup", "0")
        asked = {body["messages"][0]["content"] for body in stub.bodies}
        bench(stub.url, tmp_path / "b.json", "--dataset", str(mixed), "--requests", "4", "--warmup", "0",
              "--output-len", "7")
    assert asked == {"q0", "q1", "q2"} and set(stub.paths) == {"/v1/chat/completions"}
    assert sorted((body["messages"][0]["content"], body["max_tokens"]) for body in stub.bodies[3:]) == [
        ("a", 3), ("a", 3), ("b", 7), ("b", 7)]
    assert "4 requests came from 2 prompts" in capsys.readouterr().err


def test_what_goes_wrong_is_counted(tmp_path: Path) -> None:
    over = threading.Event()

    def answer(place: int, body: dict[str, Any]) -> int | None:
        if place == 4:
            over.wait(30)
        return (None, 429, 500)[place % 3] if place < 3 else None

    with Stub(answer=answer) as stub:
        found = bench(stub.url, tmp_path / "out.json", "--concurrency", "1", "--requests", "8", "--warmup", "0",
                      "--timeout", "3", "--slo", "e2e=30")
        over.set()
    assert (found["closed_1_completed"], found["closed_1_failed"]) == (5, 3)
    assert (found["closed_1_http_429"], found["closed_1_timeout"]) == (1, 1)
    assert found["closed_1_slo_share"] == pytest.approx(5 / 8)
    level = json.loads((tmp_path / "out.json").read_text())["levels"][0]
    assert level["faults"] == {"http_429": 1, "http_500": 1, "timeout": 1}
    assert level["messages"]["http_429"] == "said 429"


@pytest.mark.parametrize(("stub", "options", "said"), [
    ({"key": "right"}, ["--api-key", "wrong"], "refuses the key (HTTP 401)"),
    ({"answer": lambda place, body: 404}, ["--model", "other"], "refuses what is asked (HTTP 404: said 404)"),
    ({"answer": lambda place, body: 500}, [], "A request to warm up failed (http_500: said 500)"),
    ({"answer": lambda place, body: 503}, ["--warmup", "0", "--requests", "2"], "No request was answered (http_503"),
])
def test_servers_that_serve_nothing(stub: dict[str, Any], options: list[str], said: str,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(**stub) as server:
        assert main(["bench", "serve", "--url", server.url, *options]) == 2
    assert said in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main(["bench", "serve", "--url", f"http://127.0.0.1:{free.getsockname()[1]}"]) == 2
    assert "No server answers at http://127.0.0.1" in capsys.readouterr().err


def test_somebody_answers_who_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def answer() -> None:
            made, _ = listening.accept()
            with made:
                made.recv(1 << 16)
                made.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["bench", "serve", "--url", f"127.0.0.1:{listening.getsockname()[1]}"]) == 2
        thread.join()
    assert "No server answers" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "said"), [
    (["--arrivals", "poisson"], "needs --rate"), (["--arrivals", "sometimes"], "must be one of"),
    (["--rate", "2,x"], "--rate must be numbers"), (["--rate", "nan"], "--rate must be numbers"),
    (["--rate", "2", "--concurrency", "4"], "leave one of them out"), (["--arrivals", "trace"], "go together"),
    (["--slo", "speed=1"], "is no target"), (["--percentiles", "200"], "--percentiles"),
    (["--input-len", "9-3"], "a range must rise"), (["--input-len", "few"], "a whole number or a range"),
    (["--dataset", "/no/such"], "Cannot read"), (["--trace", "/no/such"], "Cannot read"),
    (["--endpoint", "embeddings"], "--endpoint"), (["--extra-body", "[1]"], "--extra-body"),
    (["--url", "ftp://x"], "no address of a server"), (["--html", "/no/such/folder/x.html"], "Cannot write"),
    (["--url", "http://x", "--speculation", "ngram"], "for a server that is started here"),
    (["--url", "http://x", "--in-process"], "two places"),
    (["--engine-options", "{}"], "is for --in-process"),
    (["--time-scale", "inf"], "--time-scale is a number, got inf"), (["--timeout", "inf"], "--timeout is a number"),
    (["--temperature", "inf"], "--temperature is a number"), (["--temperature", "nan"], "--temperature"),
])
def test_mistakes_are_explained(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *([] if "--url" in options else ["--url", "http://127.0.0.1:9"]), *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_dataset_that_asks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    for text, said in (('{"prompt": ""}', "Line 1"), ("", "has no prompts"), ('{"prompt": "a"}\n[]', "Line 2"),
                       ('{"turns": ["a"]}', "is not a question"), ('{"prompt": "a", "max_tokens": 0}', "max_tokens")):
        file.write_text(text)
        assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--dataset", str(file)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    file.write_text('{"messages": [{"role": "user", "content": "b"}]}')
    with Stub() as stub:
        assert main(["bench", "serve", "--url", stub.url, "--dataset", str(file), "--endpoint", "completions"]) == 2
    assert "use --endpoint chat" in " ".join(capsys.readouterr().err.split())


def test_ours_tells_acceptance_and_cache_hits(tmp_path: Path) -> None:
    always = {"method": "ngram", "k": 4, "adaptive": False}
    with ServerThread(write_model(tmp_path / "tiny"), speculation=always) as server:
        found = bench(server.url, tmp_path / "out.json", "--dataset", "shared-prefix", "--prefixes", "1",
                      "--prefix-len", "120", "--input-len", "4", "--output-len", "24", "--ignore-eos", "--requests",
                      "9", "--concurrency", "2", "--repeats", "2", "--warmup", "1")
    assert found["closed_2_completed"] == 18 and found["closed_2_output_tokens_mean"] == 24
    assert 0.5 < found["closed_2_cache_hits"] < 1 and 0.5 < found["closed_2_server_cache_hits"] < 1
    assert 0 <= found["closed_2_acceptance"] <= 1 and found["closed_2_accepted_per_draft"] >= 0


@pytest.mark.full
def test_a_server_of_its_own(tmp_path: Path) -> None:
    folder, target = write_model(tmp_path / "tiny"), tmp_path / "out.json"
    assert main(["bench", "serve", "--model", str(folder), "--speculation", "none", "--serve-options",
                 "--max-num-seqs 4", "--requests", "4", "--output-len", "4", "--json", str(target)]) == 0
    assert figures(target)["closed_8_completed"] == 4
    assert json.loads(target.read_text())["settings"]["serve_options"] == "--max-num-seqs 4"


def test_progress_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"begun": 5, "running": 2, "of": 9, "elapsed_s": 4.0}
    Progress("closed_2")(seen)
    assert capsys.readouterr().err == "", "not every half second, where there is no terminal"
    monkeypatch.setattr(load_test, "LINES_S", 0.0)
    Progress("closed_2")(seen)
    assert capsys.readouterr().err == "serve: closed_2: 3 of 9 done, 2 under way, 4 s\n"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take is kept there, and not among the user's profiles."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def in_process(folder: Path, target: Path, *options: str) -> dict[str, float]:
    assert main(["bench", "serve", "--in-process", "--model", str(folder), "--json", str(target), *options]) == 0
    return figures(target)


@pytest.mark.usefixtures("own_cache")
def test_the_engine_is_asked_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same load, and the same figures, as a server of the same model has."""
    folder, target = write_model(tmp_path / "tiny"), tmp_path / "out.json"
    with monkeypatch.context() as alone:
        alone.setattr("subprocess.Popen", None)
        alone.setattr("asyncio.BaseEventLoop.create_connection", None)
        found = in_process(folder, target, "--dataset", "shared-prefix", "--prefixes", "1", "--prefix-len", "120",
                           "--input-len", "4", "--output-len", "24", "--ignore-eos", "--requests", "9", "--concurrency",
                           "2", "--repeats", "2", "--warmup", "1", "--speculation",
                           '{"method": "ngram", "adaptive": false}', "--engine-options", '{"max_num_seqs": 4}')
    document = json.loads(target.read_text())
    assert document["measured"] == "engine" and document["settings"]["engine_options"] == {"max_num_seqs": 4}
    assert found["closed_2_completed"] == 18 and found["closed_2_output_tokens_mean"] == 24
    assert 0.5 < found["closed_2_cache_hits"] < 1 and 0.5 < found["closed_2_server_cache_hits"] < 1
    assert 0 <= found["closed_2_acceptance"] <= 1 and found["closed_2_accepted_per_draft"] >= 0
    assert 0 < found["closed_2_ttft_p50"] < found["closed_2_e2e_p50"]
    with ServerThread(folder, speculation={"method": "ngram"}) as server:
        served = bench(server.url, tmp_path / "served.json", "--requests", "2", "--repeats", "2", "--output-len", "4",
                       "--slo", "ttft=9")
    here = in_process(folder, target, "--requests", "2", "--repeats", "2", "--output-len", "4", "--slo", "ttft=9",
                      "--speculation", "ngram")
    drafted = {"closed_8_acceptance", "closed_8_accepted_per_draft"}  # only told where something was drafted
    assert set(here) | drafted == set(served) | drafted


@pytest.mark.usefixtures("own_cache")
def test_chats_arrivals_and_what_goes_wrong_in_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = write_model(tmp_path / "tiny"), tmp_path / "out.json"
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"messages": [{"role": "user", "content": "b"}]}\n' + json.dumps({"prompt": "a " * 9000}) + "\n")
    found = in_process(folder, target, "--dataset", str(mixed), "--requests", "4", "--rate", "50", "--output-len", "5",
                       "--warmup", "0", "--ignore-eos", "--temperature", "0.7", "--extra-body", '{"top_p": 0.9}')
    assert (found["poisson_50_completed"], found["poisson_50_failed"]) == (2, 2)
    assert "tokens" in json.loads(target.read_text())["levels"][0]["messages"]["http_400"]
    mixed.write_text('{"prompt": "a", "max_tokens": 3000}\n{"prompt": "b", "max_tokens": 2}\n')
    found = in_process(folder, target, "--dataset", str(mixed), "--requests", "2", "--ignore-eos", "--warmup", "0",
                       "--timeout", "2", "--concurrency", "1")
    assert (found["closed_1_completed"], found["closed_1_timeout"]) == (1, 1)
    assert main(["bench", "serve", "--in-process", "--model", str(folder), "--extra-body", '{"guided_x": 1}']) == 2
    assert "takes no 'guided_x'" in " ".join(capsys.readouterr().err.split())
