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

from paceline.llm import LLM
from paceline.training import checkpoints, supply
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


def test_workers_that_cannot_start_or_are_lost_are_told_apart(target_folder: Path, prompts: Path,
                                                              capfd: pytest.CaptureFixture[str]) -> None:
    cannot = Workers(some_work(target_folder, prompts, engine=engine(target_folder, kv_blocks=1), workers=1))
    lost = Workers(some_work(target_folder, prompts, last=10 ** 9, workers=1))
    try:
        said, = all_of(cannot).lost
        assert said.startswith("worker 1 of 1 could not start: max_model_len=96 needs 6 cache blocks")
        while not lost._left[0].ready:
            assert not lost.take(1.0).lost
        os.kill(lost._left[0].process.pid or 0, signal.SIGKILL)
        assert all_of(lost).lost == ["worker 1 of 1 is lost: it was ended by SIGKILL"]
    finally:
        cannot.close()
        lost.close()
    assert capfd.readouterr() == ("", "")


def test_a_run_with_workers_never_waits_and_stops_them_in_time(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two is lost, then the other: both times the run says so and goes on."""
    monkeypatch.setattr(supply, "SHARD", 0.5)
    chosen = options(steps=None, minutes=0.4, answers=10 ** 6, first_answers=10, log_steps=1, concurrent=8, workers=2)
    heard: list[News] = []
    runs: list[supply.Supply] = []
    begin = supply.Supply.begin
    monkeypatch.setattr(supply.Supply, "begin", lambda self, *given: (runs.append(self), begin(self, *given)))

    def hear(news: News) -> None:
        heard.append(news)
        workers = runs[0].workers
        if news.stage == "training" and workers is not None and workers.alive and "answers at" in news.text:
            left = workers._left[0]
            if left.ready:
                left.process.kill()

    report = train(chosen, hear)
    said = [news.text for news in heard if news.stage == "workers"]
    assert len(said) == 2 and said[0].endswith("SIGKILL. The others go on.")
    assert said[1].endswith("None is left: answers are made in turn with training.")
    stages = [news.stage for news in heard]
    assert "answers" in stages[stages.index("training"):]  # in turn, in the end
    manifest = json.loads((chosen.out / "data" / "texts" / "manifest.json").read_text())
    assert sum(shard["texts"] for shard in manifest["shards"]) == report["texts"] > 10
    indexes = [text.index for text in Shards(chosen.out / "data" / "texts", manifest["settings"], 700).read()]
    assert len(set(indexes)) == len(indexes)


def run_command(chosen: Any, *more: str) -> subprocess.Popen[str]:
    words = ["--model", chosen.model, "--data", str(chosen.data[0]), "--out", str(chosen.out), "--device", "cpu",
             "--new-tokens", "24", "--prompt-tokens", "48", "--held-out", "6", "--first-answers", "10", "--block", "3",
             "--answers", "1000000", "--draft-vocab", "96", "--batch-tokens", "384", "--log-steps", "1", *more]
    return subprocess.Popen([sys.executable, "-m", "paceline.training", "dspark", *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def alive_in(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_polite_kill_of_the_whole_group_and_the_same_command_again(options: Any) -> None:
    """As `timeout` does it: the command gets the signal twice, and its workers as well."""
    chosen = options()
    process = run_command(chosen, "--minutes", "0.6", "--workers", "2")
    assert process.stderr is not None
    for line in process.stderr:
        if "training: step 3," in line:
            break
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from there" in errors
    assert "Traceback" not in errors and "worker" not in errors and not out
    assert not alive_in(process.pid)
    assert (chosen.out / checkpoints.NAME).exists()
    before = len((chosen.out / "data" / "texts" / "manifest.json").read_text())
    process = run_command(chosen, "--minutes", "0.6", "--workers", "2", "--generate-until", "0.9")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in errors and "worker" not in errors, errors
    assert json.loads(out)["steps"] > 3 and " answers at " in errors
    assert len((chosen.out / "data" / "texts" / "manifest.json").read_text()) > before
    assert not alive_in(process.pid)


def test_workers_end_when_the_parent_is_gone(options: Any) -> None:
    process = run_command(options(), "--minutes", "5", "--workers", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if "training: step 1," in line:
            break
    process.kill()
    process.wait()
    process.stderr.close()
    end = time.monotonic() + 60
    while alive_in(process.pid):
        assert time.monotonic() < end, "a worker has outlived its parent"
        time.sleep(0.1)


def test_a_card_is_divided() -> None:
    """Blocks of 1 MiB, texts of 40: workers get what their texts need, or less each, or some of them nothing."""
    block = 1 << 20
    assert divide(58 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(4, 5120)
    assert divide(20 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(4, 2048)
    assert divide(8 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(2, 1024)
    assert divide(3 * GIB, BESIDE + GIB, block, 40, 128, 4) == Engines(0, 0)
    assert divide(-GIB, BESIDE, block, 40, 128, 4) == Engines(0, 0)
