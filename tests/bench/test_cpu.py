"""bench cpu: which cases run, what is measured of whom, and how the figures are written down."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny import tiny_engine
from paceline.bench import cpu, cpu_peers, cpu_quality
from paceline.bench.report import document, table
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.measure.agreement import Best
from paceline.models.load.opening import open_checkpoint

FAMILY = Path(__file__).parents[1] / "family" / "target"


class Stub:
    """An engine whose figures are known: it is asked, it answers."""

    def __init__(self, name: str, rate: float, step_ms: float) -> None:
        self.name, self._rate, self._step_ms = name, rate, step_ms
        self.asked: list[tuple[str, int, int]] = []

    def decode(self, prompt, new_tokens):
        self.asked.append(("decode", len(prompt), new_tokens))
        return self._rate if len(prompt) < 1000 else self._rate / 2

    def prefill(self, prompt):
        self.asked.append(("prefill", len(prompt), 0))
        return self._rate

    def batch(self, prompts, new_tokens):
        self.asked.append(("batch", len(prompts), new_tokens))
        return self._rate

    def step(self, prefix, tokens):
        self.asked.append(("step", len(prefix), len(tokens)))
        return self._step_ms


@pytest.fixture
def no_rest(monkeypatch):
    """Neither a pause nor a collection of garbage, which takes a second where a whole suite has been imported."""
    monkeypatch.setattr(cpu, "REST_S", 0.0)
    monkeypatch.setattr(cpu.gc, "collect", lambda: None)


def test_the_cases_have_the_names_the_figures_are_known_by():
    assert list(cpu.CASES) == ["decode", "prefill_512", "prefill_2048", "batch_8", "batch_32", "context_4096",
                               "step_1", "step_2", "step_3", "step_4", "step_6", "step_8", "step_16", "step_32"]


@pytest.mark.parametrize(("text", "names"), [
    ("decode", ["decode"]), ("batch_8, decode", ["decode", "batch_8"]), ("step_4,step_4", ["step_4"]),
    ("step", [name for name in cpu.CASES if name.startswith("step_")]), (None, list(cpu.CASES))])
def test_cases_are_chosen_by_name(text, names):
    assert [case.name for case in cpu.choose(text).cases] == names


@pytest.mark.parametrize("text", ["", "decode,", "step_5", "Decode"])
def test_an_unknown_case_is_named_with_the_known(text):
    with pytest.raises(ConfigError, match="context_4096"):
        cpu.choose(text)


def test_the_command_line_refuses_an_unknown_case_before_it_loads_anything(capsys):
    assert main(["bench", "cpu", "--cases", "warp"]) == 2
    assert "'warp'" in capsys.readouterr().err


def test_everybody_gets_the_same_work_in_turn(no_rest):
    ours, theirs = Stub("paceline", 100.0, 5.0), Stub("peer", 50.0, 10.0)
    cpu.measure(cpu.choose("decode,prefill_512,batch_8,context_4096,step_4").cases, [ours, theirs], 50000, repeats=3)
    assert ours.asked == theirs.asked
    assert ours.asked[:5] == [("decode", 64, 128), ("prefill", 512, 0), ("batch", 8, 64), ("decode", 4096, 32),
                              ("step", 64, 4)]
    assert ours.asked.count(("decode", 64, 128)) == 3 and ours.asked.count(("decode", 4096, 32)) == 2


def test_the_best_turn_counts_whichever_way_is_better(no_rest):
    answers = iter([3.0, 5.0, 4.0])
    case = cpu.Case("x", "tok/s", lambda who, vocab: next(answers))
    assert cpu.measure([case], [Stub("a", 0, 0)], 50000, 3) == {"x": {"a": 5.0}}
    answers = iter([3.0, 5.0, 4.0])
    case = cpu.Case("x", "ms", lambda who, vocab: next(answers), higher_is_better=False)
    assert cpu.measure([case], [Stub("a", 0, 0)], 50000, 3) == {"x": {"a": 3.0}}


def test_ratios_are_above_one_where_paceline_is_ahead_of_the_best_peer(no_rest):
    cases = cpu.choose("decode,context_4096,step_2").cases
    contenders = [Stub("paceline", 120.0, 4.0), Stub("slow", 60.0, 12.0), Stub("fast", 100.0, 6.0)]
    result = document(cpu.rows_of(cases, cpu.measure(cases, contenders, 50000, 1)), threads=2)
    rows = {row["case"]: row for row in json.loads(json.dumps(result))["rows"]}
    assert rows["decode"] == {"case": "decode", "unit": "tok/s", "paceline": 120.0,
                              "peers": {"slow": 60.0, "fast": 100.0}, "ratio": 1.2, "better": "higher"}
    assert rows["step_2"]["ratio"] == 1.5 and rows["step_2"]["better"] == "lower"
    assert rows["context_4096_share"]["paceline"] == 0.5
    assert "1.20x" in table(result) and "1.50x" in table(result)


def test_a_peer_with_worse_answers_counts_in_the_first_ratio_only(no_rest):
    """KL at most twice ours is as good; one whose logits cannot be had is not."""
    cases = cpu.choose("decode").cases
    contenders = [Stub("paceline", 120.0, 4.0), Stub("coarse", 200.0, 4.0), Stub("good", 100.0, 4.0),
                  Stub("mute", 300.0, 4.0)]
    for stub, flip in zip(contenders, (0.1, 2.0, 0.12, 0.0)):
        stub.logits = lambda tokens, flip=flip: np.array([[1.0, flip, -5.0]] * len(tokens), dtype=np.float32)
    contenders[3].logits = mute
    best = Best.of(torch.tensor([[1.0, 0.0, -5.0]] * 9))
    qualities = cpu_quality.compare(contenders, [0, 1, 2, 1, 0, 2, 1, 0, 1, 2], best)
    assert qualities.top1 == {"paceline": 1.0, "coarse": 0.0, "good": 1.0}
    assert qualities.equals("paceline") == {"good"} and qualities.missing == ["mute: it does not tell"]
    result = document(cpu.rows_of(cases, cpu.measure(cases, contenders, 50000, 1), qualities))
    rows = {row["case"]: row for row in json.loads(json.dumps(result))["rows"]}
    assert rows["decode"]["ratio"] == pytest.approx(0.4) and rows["decode"]["equal_ratio"] == pytest.approx(1.2)
    assert rows["top1"]["paceline"] == 100.0 and rows["top1"]["note"] == "mute: it does not tell"
    assert rows["kl"]["peers"]["coarse"] > rows["kl"]["peers"]["good"] > rows["kl"]["paceline"] > 0
    assert "equal quality" in table(result) and "1.20x" in table(result)


def test_peers_are_judged_on_a_text_beside_their_speed(no_rest, monkeypatch, tmp_path, capsys):
    """The whole command with a peer that is as fast as can be and knows nothing."""
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago I thought I would sail about a little. " * 30)
    peer = Stub("blind", 1.0, 1e-9)
    monkeypatch.setattr(cpu_quality, "TOKENS", 200)
    monkeypatch.setattr(cpu_quality, "WINDOW", 100)
    peer.logits = lambda tokens: np.zeros((len(tokens), 1024), dtype=np.float32)
    monkeypatch.setattr(cpu, "available", lambda model, threads: ([peer], []))
    result = cpu.run(str(FAMILY), "step_1", peers=True, repeats=1, threads=1, text=str(text))
    rows = {row["case"]: row for row in result["rows"]}
    assert rows["top1"]["paceline"] > 95.0 > rows["top1"]["peers"]["blind"]
    assert rows["kl"]["paceline"] < 0.01 < rows["kl"]["peers"]["blind"]
    assert rows["step_1"]["ratio"] < 1.0 and rows["step_1"]["equal_ratio"] is None, "nobody else is as good"
    printed = table(result)
    assert "equal quality" in printed and "top1" in printed and "kl" in printed
    assert "--text" not in capsys.readouterr().err


def test_without_a_text_peers_are_not_judged_and_that_is_said(no_rest, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "available", lambda model, threads: ([Stub("peer", 50.0, 4.0)], []))
    result = cpu.run(str(FAMILY), "step_1", peers=True, repeats=1, threads=1)
    assert [row["case"] for row in result["rows"]] == ["step_1"] and "equal_ratio" not in result["rows"][0]
    assert "--text" in capsys.readouterr().err


def mute(tokens):
    raise cpu_peers.PeerUnavailable("mute: it does not tell")


def test_llama_cpp_and_onnxruntime_hand_out_logits_of_every_token():
    """Against doubles of both packages: what is asked of them, and the shape of what comes back."""
    wanted = np.arange(12, dtype=np.float32).reshape(3, 4)

    class Api:
        def llama_model_get_vocab(self, model):
            return model

        def llama_vocab_n_tokens(self, vocab):
            return 4

        def llama_get_logits(self, context):
            return wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    peer = object.__new__(cpu_peers.LlamaCpp)
    asked = []
    peer._api, peer._model, peer._context = Api(), "model", "context"
    peer._open = lambda tokens, sequences: asked.append((tokens, sequences))
    peer._pass = lambda tokens, places, sequences, rows: asked.append((tokens, list(places), list(rows)))
    assert np.array_equal(peer.logits([7, 8, 9]), wanted)
    assert asked == [(3, 1), ([7, 8, 9], [0, 1, 2], [1, 1, 1])]

    class Generator:
        rows = wanted[None]

        def append_tokens(self, tokens):
            assert tokens.tolist() == [[7, 8, 9]]

        def get_output(self, name):
            return self.rows

    other = object.__new__(cpu_peers.OnnxRuntime)
    other._all, other._generator = "model", lambda model, length, sequences: Generator()
    assert np.array_equal(other.logits([7, 8, 9]), wanted)
    Generator.rows = wanted[None, -1:]
    with pytest.raises(cpu_peers.PeerUnavailable, match="1 of 3"):
        other.logits([7, 8, 9])


def test_paceline_tells_the_logits_of_every_token():
    engine = tiny_engine(enable_prefix_caching=False, max_batch_tokens=64)
    ours = cpu.Paceline(LLM.from_engine(engine))
    whole, some = ours.logits([1, 2, 3, 4, 5]), ours.logits([1, 2, 3])
    assert whole.shape == (5, ours.vocab_size)
    assert np.allclose(whole[:3], some, atol=1e-4)
    assert engine.cache.usage().used == 0


def test_paceline_is_measured_through_its_own_engine():
    engine = tiny_engine(enable_prefix_caching=False, max_batch_tokens=64)
    ours = cpu.Paceline(LLM.from_engine(engine))
    prompts = [[salt + 1, 2, 3, 4] for salt in range(3)]
    assert ours.decode(prompts[0], 6) > 0
    assert ours.prefill(prompts[0]) > 0
    assert ours.batch(prompts, 5) > 0
    assert ours.step([1, 2, 3, 4, 5], [6, 7, 8]) > 0
    assert not engine.has_work and engine.cache.usage().used == 0


def test_a_step_computes_the_logits_of_every_row(monkeypatch):
    engine = tiny_engine(enable_prefix_caching=False)
    ours = cpu.Paceline(LLM.from_engine(engine))
    seen = []
    run = engine.runner.run_batch

    def spy(batch, taps=frozenset()):
        seen.append(run(batch, taps))
        return seen[-1]

    monkeypatch.setattr(engine.runner, "run_batch", spy)
    prefix, tokens = [1, 2, 3, 4, 5], [6, 7, 8]
    ours.step(prefix, tokens)
    assert seen[-1].logits.shape == (3, ours.vocab_size)
    assert torch.equal(seen[-1].logits, seen[1].logits), "the same step over and over"


def test_what_others_use_of_the_machine_is_what_is_busy_beyond_oneself(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    hertz = os.sysconf("SC_CLK_TCK")
    own = iter([10.0, 12.0])
    monkeypatch.setattr(cpu.os, "times", lambda: os.times_result((next(own), 0.0, 0.0, 0.0, 0.0)))
    stat.write_text(f"cpu {100 * hertz} 0 0 {50 * hertz} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    neighbours = cpu.Neighbours(stat)
    stat.write_text(f"cpu {107 * hertz} 0 0 {53 * hertz} 0 0 0 0 0 0\n")
    assert neighbours.share() == pytest.approx(0.5), "7 s busy of 10, 2 of them our own"
    assert cpu.Neighbours(tmp_path / "nothing").share() is None


def test_without_the_packages_the_peers_are_left_out_with_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_peers.importlib.util, "find_spec", lambda name: None)
    found, missing = cpu_peers.available(tmp_path / "model.gguf", 2)
    assert found == []
    assert missing == ["llama.cpp is left out: the package llama_cpp is not installed",
                       "onnxruntime is left out: the package onnxruntime_genai is not installed"]


def test_a_model_written_as_a_folder_for_a_peer_is_the_same_model(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    from safetensors.torch import save_file

    (source / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    tensors = {"model.norm.weight": torch.arange(8.0), "model.embed_tokens.weight": torch.randn(5, 8).bfloat16()}
    save_file(tensors, source / "model.safetensors")
    cpu_peers.write_folder(source, tmp_path / "copy")
    with open_checkpoint(tmp_path / "copy") as copy:
        assert copy.config["hidden_size"] == 8
        assert sorted(copy.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(copy.tensor(name), tensor.float())
