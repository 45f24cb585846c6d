"""Answers made beside training: the same texts whoever makes them, and no run ends because a worker does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.llm import LLM
from paceline.training import checkpoints, run, supply
from paceline.training.clock import Clock
from paceline.training.generate import AnswerMaker, Order
from paceline.training.jobs import Jobs, encoder
from paceline.training.memory import BESIDE, Engines, divide
from paceline.training.news import News
from paceline.training.prompts import read_prompts
from paceline.training.run import train
from paceline.training.shards import Shards
from paceline.training.worker import Work
from paceline.training.workers import Came, Workers

GIB = 1 << 30


def engine(target_folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(target_folder), "device": "cpu", "kernels": "reference", "max_model_len": 96,
            "max_num_seqs": 8} | changes


def some_work(target_folder: Path, prompts: Path, **changes: Any) -> Work:
    usual: dict[str, Any] = {
        "engine": engine(target_folder), "prompts": read_prompts([prompts])[:6], "seed": 5, "temperatures": (0.0, 1.0),
        "prompt_tokens": 48, "new_tokens": 12, "first": 3, "last": 23, "done": np.array([4, 9, 10]), "workers": 2,
        "threads": 1}
    return Work(**usual | changes)


def as_lists(texts: Any) -> list[tuple[int, list[int], int]]:
    return sorted((text.index, text.tokens.tolist(), text.prompt) for text in texts)


def all_of(workers: Workers) -> Came:
    came = Came()
    end = time.monotonic() + 120
    while workers.alive:
        assert time.monotonic() < end
        more = workers.take(1.0)
        came = Came(came.texts + more.texts, came.left_out + more.left_out, came.lost + more.lost)
    return came


@pytest.mark.slow
def test_whoever_makes_them_the_texts_are_the_same(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    given = some_work(target_folder, prompts)
    workers = Workers(given)
    try:
        llm = LLM(**given.engine)
        jobs = Jobs(given.prompts, encoder(llm), given.seed, given.temperatures, given.prompt_tokens)
        shards = Shards(tmp_path / "s", {}, 700)
        AnswerMaker(llm, [Order(jobs, shards, given.first, given.last)], given.new_tokens).run(lambda: False)
        came = all_of(workers)
    finally:
        workers.close()
    here = [text for text in shards.read() if text.index not in given.done]
    assert len(here) == 17 and as_lists(came.texts) == as_lists(here)
    assert not came.lost and not came.left_out and workers.seconds > 0
    assert [given.first_of(number) for number in (0, 1)] == [4, 3]


class Hand:
    """A clock that is moved by hand: tests wait for what happens, however slow the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = 0.0
        monkeypatch.setattr(Clock, "share", lambda clock, step: self.share)
        self.supplies: list[supply.Supply] = []
        begin = supply.Supply.begin
        monkeypatch.setattr(supply.Supply, "begin",
                            lambda one, *given: (self.supplies.append(one), begin(one, *given)))

    @property
    def workers(self) -> Workers:
        found = self.supplies[-1].workers
        assert found is not None
        return found


@pytest.mark.slow
def test_a_run_loses_a_worker_and_lets_the_other_go_in_time(options: Any, monkeypatch: pytest.MonkeyPatch,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    hand = Hand(monkeypatch)
    monkeypatch.setattr(supply, "SHARD", 0.5)
    heard: list[News] = []
    grown: set[int] = set()

    def hear(news: News) -> None:
        heard.append(news)
        if news.stage != "training":
            return
        left = hand.workers._left
        if len(left) == 2 and all(one.ready for one in left):
            left[0].process.kill()
        elif len(left) == 1 and " answers at " in news.text:
            grown.add(len(hand.supplies[0].pool.texts))
            hand.share = 0.8 if len(grown) > 2 else 0.0
        elif not left:
            hand.share = 1.0

    chosen = options(steps=None, minutes=10.0, answers=10 ** 6, first_answers=10, log_steps=1, concurrent=8, workers=2)
    report = train(chosen, hear)
    assert [news.text for news in heard if news.stage == "workers"] == [
        "worker 1 of 2 is lost: it was ended by SIGKILL. The others go on."]
    stages = [news.stage for news in heard]
    assert "answers" not in stages[stages.index("training"):]  # training waits for nobody
    assert report["generated_tokens_per_second"] > 0 and report["trained_tokens_per_second"] > 0
    manifest = json.loads((chosen.out / "data" / "texts" / "manifest.json").read_text())
    indexes = [text.index for text in Shards(chosen.out / "data" / "texts", manifest["settings"], 700).read()]
    assert report["texts"] == len(indexes) == len(set(indexes)) > 10
    assert indexes == [text.index for text in hand.supplies[0].pool.texts]
    assert capfd.readouterr() == ("", "")


def test_without_any_worker_answers_are_made_in_turn(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    monkeypatch.setattr(supply, "TURN", 0.1)
    monkeypatch.setattr(run, "divide_card", lambda llm, at_once, workers: Engines(workers, 1))  # no room at all
    heard: list[News] = []

    def hear(news: News) -> None:
        heard.append(news)
        if news.stage == "answers" and "training" in {one.stage for one in heard}:
            hand.share = 1.0

    report = train(options(steps=None, minutes=10.0, answers=10 ** 6, first_answers=10, log_steps=1, workers=1), hear)
    said, = (news.text for news in heard if news.stage == "workers")
    assert said.startswith("worker 1 of 1 could not start: max_model_len=96 needs 6 cache blocks")
    assert said.endswith("None is left: answers are made in turn with training.")
    assert report["steps"] > 0 and report["texts"] > 10


def run_command(chosen: Any, *more: str) -> subprocess.Popen[str]:
    words = ["--model", chosen.model, "--data", str(chosen.data[0]), "--out", str(chosen.out), "--device", "cpu",
             "--new-tokens", "24", "--prompt-tokens", "48", "--held-out", "6", "--first-answers", "10", "--block", "3",
             "--answers", "1000000", "--draft-vocab", "96", "--batch-tokens", "384", "--log-steps", "1", *more]
    return subprocess.Popen([sys.executable, "-m", "paceline.training", "dspark", *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def none_is_left(group: int) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line and " answers at " in line:
            return line
    raise AssertionError("".join(seen))


@pytest.mark.slow
def test_a_polite_kill_the_same_command_again_and_a_rude_one(options: Any) -> None:
    """The first as `timeout` does it: the command gets the signal twice, and its workers as well. Nobody stays."""
    chosen = options()
    process = run_command(chosen, "--minutes", "10", "--workers", "2")
    wait_for(process, "training: step 3,")
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in errors
    assert "Traceback" not in errors and "worker" not in errors and not out
    assert none_is_left(process.pid)
    state = torch.load(chosen.out / checkpoints.NAME, weights_only=True)
    assert state["step"] >= 3 and state["elapsed"] > 0

    process = run_command(chosen, "--minutes", "10", "--workers", "2")
    wait_for(process, f"training: step {state['step'] + 2},")
    process.kill()
    assert process.stderr is not None and "Traceback" not in process.stderr.read()
    process.wait()
    assert none_is_left(process.pid)


def test_a_card_is_divided() -> None:
    """Blocks of 1 MiB, texts of 40: workers get what their texts need, or less each, or some of them nothing."""
    block = 1 << 20
    assert divide(58 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(4, 5120)
    assert divide(20 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(4, 2048)
    assert divide(8 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(2, 1024)
    assert divide(3 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(0, 0)
    assert divide(-GIB, BESIDE, block, 40, 128, 4) == Engines(0, 0)
