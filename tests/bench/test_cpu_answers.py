"""bench cpu's case `answers`: who is asked what, what the clock counts, what nobody may remember, and the ratios."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest

from engine.tiny import tiny_llm
from paceline.bench import cpu, cpu_answers, cpu_peers
from paceline.bench.cpu_answers import Answer, Contender, Turn
from paceline.bench.report import document, table
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.request import SamplingParams

FAMILY = Path(__file__).parents[1] / "family" / "target"


class Writer:
    """A peer that always writes the same, and notes what it was asked and how many tokens were taken from it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self._tokens = name, tokens
        self.asked: list[tuple[list[int], int]] = []
        self.taken = 0

    def answer(self, prompt, most):
        self.asked.append((prompt, most))
        return self._written()

    def _written(self):
        for token in self._tokens:
            self.taken += 1
            yield token


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(cpu_answers, "REST_S", 0.0)
    monkeypatch.setattr(cpu_answers, "MOST", 6)
    monkeypatch.setattr(cpu_answers, "WARM_UP", 2)


@pytest.fixture
def dataset(tmp_path):
    def write(*texts: str) -> str:
        path = tmp_path / "questions.jsonl"
        path.write_text("\n".join(json.dumps({"question_id": number, "category": "qa", "turns": [text, "Why?"]})
                                  for number, text in enumerate(texts)))
        return str(path)
    return write


def test_the_clock_tells_the_prompt_from_the_decoding(monkeypatch):
    """Every look at the clock is a second later: one before, one a token."""
    now = iter(range(100))
    monkeypatch.setattr(cpu_answers.time, "perf_counter", lambda: float(next(now)))
    assert cpu_answers.clocked(iter([5, 6, 7, 8]), 3, frozenset()) == Answer((5, 6, 7), seconds=3.0, decode_s=2.0)


@pytest.mark.parametrize(("most", "tokens"), [(9, (5, 6, 2)), (3, (5, 6, 2)), (2, (5, 6)), (1, (5,))])
def test_an_answer_ends_with_the_text_or_where_it_has_to(most, tokens):
    """Nothing is computed behind that: the clock would run."""
    peer = Writer("peer", [5, 6, 2, 7, 8])
    assert cpu_answers.beside(peer, frozenset({2})).answer([1], most, "0").tokens == tokens
    assert peer.taken == len(tokens)


def test_rates_are_of_all_answers_together():
    turn = Turn((Answer((1,) * 11, 4.0, 1.0), Answer((1,) * 5, 1.0, 1.0), Answer((2,), 3.0, 0.0)))
    assert turn.decode_rate == pytest.approx((10 + 4) / 2)
    assert turn.rate == pytest.approx(17 / 8)
    assert Turn((Answer((2,), 3.0, 0.0),)).decode_rate == 0.0, "one token each: nothing was decoded"


def test_everybody_gets_the_same_prompts_and_each_begins_in_turn(quick):
    asked = []

    def contender(name):
        return Contender(name, lambda prompt, most, turn: asked.append((name, prompt, most, turn)) or
                         Answer((1, 1), 1.0, 1.0))

    found = cpu_answers.measure([contender("a"), contender("b")], [[1], [2], [3]], repeats=5)
    assert asked[:2] == [("a", [1], 2, "warm-up"), ("b", [1], 2, "warm-up")]
    assert [(name, prompt[0], turn) for name, prompt, most, turn in asked[2:]] == [
        (name, prompt, turn) for turn in "01" for prompt, names in ((1, "ab"), (2, "ba"), (3, "ab")) for name in names]
    assert {name: [len(turn.answers) for turn in turns] for name, turns in found.items()} == {"a": [3, 3], "b": [3, 3]}


def test_no_turn_finds_what_another_has_read_or_written(quick, monkeypatch):
    """With a prefix cache and a drafter that remembers texts: were turns not kept apart, the cache would have the
    prompt, and the drafter the whole answer."""
    monkeypatch.setattr(cpu_answers, "MOST", 24)
    llm = tiny_llm(enable_prefix_caching=True)
    outs = []
    generate = llm.generate

    always = {"method": "suffix", "adaptive": False}  # whether it pays is for the clock to say

    def noted(*args, speculation):
        outs.extend(generate(*args, speculation=speculation and always))
        return outs[-1:]

    monkeypatch.setattr(llm, "generate", noted)
    prompt = [place * 7 % 90 for place in range(40)]
    found = cpu_answers.measure([cpu_answers.paceline(llm, "suffix"), cpu_answers.paceline(llm, None)], [prompt], 2)
    assert len({answer.tokens for turns in found.values() for turn in turns for answer in turn.answers}) == 1
    assert len(outs) == 2 + 2 * 2 and all(out.metrics.cached_tokens == 0 for out in outs)
    first, second = (out for out in outs[2:] if out.speculation is not None)
    assert second.metrics.steps == first.metrics.steps, "what was written before was there to be copied"
    params = SamplingParams(max_tokens=24, temperature=0.0, cache_salt="answers suffix 1")
    again = generate([prompt], params, speculation=always)[0]
    assert again.metrics.cached_tokens > 0 and again.metrics.steps < first.metrics.steps, "as it would have been"


def test_ratios_are_against_the_best_peer_and_the_best_of_equal_quality():
    def turn(decode_s, seconds, token=1):
        return Turn((Answer((token,) * 11, seconds, decode_s),))

    found = {"auto": [turn(0.5, 1.0), turn(0.1, 0.5)], "plain": [turn(0.2, 1.0)], "coarse": [turn(0.05, 0.25, 3)],
             "good": [turn(0.25, 2.0, 4)]}
    rows = {row["case"]: row for row in json.loads(json.dumps(
        document(cpu_answers.rows_of(found, frozenset({"good"})))))["rows"]}
    assert list(rows) == ["answers", "answers_plain", "answers_whole", "answers_whole_plain"]
    first = rows["answers"]
    assert first["paceline"] == pytest.approx(100.0) and first["unit"] == "tok/s", "the better turn counts"
    assert first["peers"] == pytest.approx({"coarse": 200.0, "good": 40.0})
    assert first["ratio"] == pytest.approx(0.5) and first["equal_ratio"] == pytest.approx(2.5)
    assert rows["answers_plain"]["paceline"] == pytest.approx(50.0)
    assert rows["answers_plain"]["equal_ratio"] == pytest.approx(1.25)
    assert rows["answers_whole"]["paceline"] == pytest.approx(22.0)
    assert rows["answers_whole"]["peers"] == pytest.approx({"coarse": 44.0, "good": 5.5})
    assert rows["answers_whole_plain"]["paceline"] == pytest.approx(11.0)
    assert "each engine's own text" in first["note"] and "good 11" in first["note"]
    assert "1 of 1 texts of auto" in first["note"]
    assert "equal_ratio" not in cpu_answers.rows_of(found)[0].as_dict(), "nobody judged them"


def test_the_whole_command_asks_first_turns_of_paceline_and_peers(quick, monkeypatch, dataset):
    file = dataset("Hello there, how are you?", "What is ice?", "And this is the third of its category.")
    peer = Writer("peer", [7] * 50)
    monkeypatch.setattr(cpu, "available", lambda model, threads: ([peer], []))
    result = cpu.run(str(FAMILY), "answers", peers=True, repeats=1, threads=1, dataset=file)
    rows = {row["case"]: row for row in result["rows"]}
    assert list(rows) == ["answers", "answers_plain", "answers_whole", "answers_whole_plain"]
    assert all(row["paceline"] > 0 and row["peers"]["peer"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert [most for _, most in peer.asked] == [2, 6, 6], "two of a category, and one to warm up"
    assert peer.asked[0] == (peer.asked[1][0], 2) and peer.asked[1][0] != peer.asked[2][0]
    assert "2 of 2 texts of auto are those of plain" in rows["answers"]["note"]
    assert "answers_whole_plain" in table(result)


def test_too_long_questions_are_left_out_and_that_is_said(quick, monkeypatch, dataset, capsys):
    from paceline.llm import LLM

    llm = LLM(str(FAMILY), device="cpu", threads=1)
    short, long = "What is ice?", "ice and snow " * 30
    asked = cpu_answers.questions(dataset(short, long))
    ids = cpu_answers.prompts_of(llm, asked)
    assert len(ids) == 2 and len(ids[1]) > len(ids[0])
    monkeypatch.setattr(cpu_answers, "ROOM", len(ids[0]) + 6)
    assert cpu_answers.prompts_of(llm, asked) == ids[:1]
    assert "1 of 2 questions are left out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at most"):
        cpu_answers.prompts_of(llm, asked[1:])


def test_the_questions_that_come_along_are_two_of_each_kind():
    found = cpu.choose("answers").questions
    kinds = [question.group for question in found]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 2)
    assert len(cpu.choose("decode, answers", None, 1).questions) == 6
    assert len(cpu.choose("answers", None, 0).questions) > 20


def test_answers_are_given_where_they_are_asked_for():
    assert cpu.choose(None).questions == [] and cpu.choose("step").questions == []
    assert [case.name for case in cpu.choose("answers, decode").cases] == ["decode"]
    assert cpu.choose("answers").cases == []


@pytest.mark.parametrize("given", [["--dataset", "x.jsonl"], ["--per-category", "1"],
                                   ["--cases", "answers", "--dataset", "/no/such/file.jsonl"]])
def test_the_command_line_refuses_before_it_loads_anything(given, monkeypatch, capsys):
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: pytest.fail("it went on"))
    assert main(["bench", "cpu", *given]) == 2
    said = capsys.readouterr().err
    assert ("file.jsonl" if given[-1].endswith("file.jsonl") else "answers") in said


def test_the_command_line_hands_the_questions_over(monkeypatch, dataset, capsys):
    asked = []
    monkeypatch.setattr("paceline.cli.bench._fetch", lambda model: None)
    monkeypatch.setattr(cpu, "run", lambda *args: asked.append(args) or document([]))
    file = dataset("What is ice?")
    assert main(["bench", "cpu", "--cases", "answers", "--dataset", file, "--per-category", "3"]) == 0
    assert asked == [(None, "answers", False, 3, None, "auto", None, file, 3)]


def test_llama_cpp_writes_the_likeliest_tokens_after_an_emptied_cache():
    """Against a double of its functions: every pass but the prompt's is the token picked before it, at its place."""
    logits = np.zeros((1, 8), dtype=np.float32)
    passed, opened = [], []

    class Api:
        def llama_model_get_vocab(self, model):
            return model

        def llama_vocab_n_tokens(self, vocab):
            return 8

        def llama_get_logits(self, context):
            return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def run(tokens, places, sequences, wanted):
        passed.append((list(tokens), list(places), list(wanted)))
        logits[:] = 0.0
        logits[0, (tokens[-1] + 1) % 8] = 1.0

    peer = object.__new__(cpu_peers.LlamaCpp)
    peer._api, peer._model, peer._context = Api(), "model", "context"
    peer._open = lambda tokens, sequences: opened.append((tokens, sequences))
    peer._pass = run
    written = peer.answer([1, 4], 3)
    assert opened == [(cpu_peers.ROOM, 1)] and passed == [], "emptied before the clock runs, read while it does"
    assert cpu_answers.clocked(written, 3, frozenset()).tokens == (5, 6, 7)
    assert passed == [([1, 4], [0, 1], [0, 1]), ([5], [2], [1]), ([6], [3], [1])]
    assert list(peer.answer([1, 4], 2)) == [5, 6]


def test_onnxruntime_may_end_a_text_itself():
    """Against a double: no least length, unlike where speed is measured on a fixed count of tokens."""
    options = {}

    class Generator:
        def __init__(self, model, params):
            self.left = [5, 6, 2]

        def append_tokens(self, tokens):
            assert tokens.tolist() == [[1, 4]]

        def is_done(self):
            return not self.left

        def generate_next_token(self):
            self.token = self.left.pop(0)

        def get_next_tokens(self):
            return np.array([self.token], dtype=np.int32)

    class Params:
        def __init__(self, model): ...

        def set_search_options(self, **given):
            options.update(given)

    class Api:
        GeneratorParams = Params

    Api.Generator = Generator
    peer = object.__new__(cpu_peers.OnnxRuntime)
    peer._api, peer._last = Api(), "model"
    assert cpu_answers.clocked(peer.answer([1, 4], 10), 10, frozenset()).tokens == (5, 6, 2)
    assert options == {"max_length": 12, "min_length": 0, "batch_size": 1, "do_sample": False}
    peer._generator("model", 12, 1)
    assert options["min_length"] == 12
