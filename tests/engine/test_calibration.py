"""What steps take is measured before the first request, or known from last time; and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.tiny import tiny_engine, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.async_llm import AsyncLLM
from paceline.config import EngineOptions
from paceline.engine import profile as profile_module
from paceline.engine.build import engine_for
from paceline.engine.calibration import calibrate
from paceline.engine.core import Engine
from paceline.engine.profile import Profile
from paceline.speculation.step_cost import Load, StepCost


@pytest.mark.parametrize("options", [{}, {"kernels": "stepped"}])
def test_calibration_measures_steps_and_leaves_nothing_behind(options: dict[str, Any]) -> None:
    llm = tiny_llm(**options)
    engine = llm.engine
    before = engine.report()
    calibrate(engine)
    assert all(engine.cost.knows(rows) for rows in (1, 2, 3, 4))
    assert engine.cost.prompts.measured
    after = engine.report()
    same = [name for name in before if name not in ("cache_looked_up_tokens", "cache_hit_rate", "cache_evictions")]
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert not engine.has_work and not engine._records
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids \
        == tiny_llm().generate([[1, 2, 3]], params)[0].outputs[0].token_ids


def test_the_log_says_how_long_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    now = iter(range(10**6))
    engine = tiny_engine()
    engine.clock = lambda: next(now) / 1000  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "paceline"):
        engine.warm_up()
        begun = next(now)
        engine.profiled = True
        engine.warm_up()  # known: nothing is measured
    (line,) = [one.getMessage() for one in caplog.records if "measured in" in one.getMessage()]
    said = float(line.removeprefix("what steps take was measured in ").removesuffix(" s"))
    assert 0 < said <= begun / 1000 + 0.005  # as it is rounded


def test_calibration_stops_where_steps_take_long() -> None:
    """A clock that ticks only as the steps of a large model would: 0.2 s a row."""
    now = [0.0]
    engine = tiny_engine()
    engine.clock = lambda: now[0]  # type: ignore[method-assign]
    step, most = engine.loop.step, [0]

    def slow(*given: Any) -> None:
        rows = len(engine.scheduler.running) + engine.scheduler.queue_length
        most[0] = max(most[0], rows)
        now[0] += 0.2 * rows
        step(*given)

    engine.loop.step = slow  # type: ignore[method-assign]
    calibrate(engine)
    assert most[0] <= 4


@pytest.mark.parametrize(("row", "seconds"), [(0.02, 1.5), (0.1, 1.5)])
def test_no_prompt_takes_calibration_beyond_its_time(row: float, seconds: float) -> None:
    """A clock that ticks as the rows of a large model would, those of prompts too."""
    now = [0.0]
    engine = tiny_engine()
    engine.clock = lambda: now[0]  # type: ignore[method-assign]
    executor: Any = engine.executor
    run = executor._run

    def slow(step: Any, batch: Any) -> None:
        begun = now[0]
        run(step, batch)
        now[0] = begun + row * step.rows
        executor._forward_s = now[0] - begun

    executor._run = slow
    calibrate(engine)
    assert engine.cost.knows(1) and now[0] <= seconds


def measured() -> StepCost:
    cost = StepCost()
    for rows, seconds in ((1, 5e-3), (2, 6e-3), (4, 9e-3), (8, 17e-3)):
        for _ in range(3):
            cost.observe(Load(rows), seconds)
    cost.observe(Load(0, 0.0, 64, 64 * 32.0), 0.1)
    return cost


def test_a_profile_of_other_kernels_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    built = tmp_path / "kernels.so"
    built.write_bytes(b"one")
    monkeypatch.setattr(profile_module, "load", lambda: SimpleNamespace(__file__=str(built)))
    Profile(model="a").save(measured())
    assert Profile(model="a").load(StepCost())
    built.write_bytes(b"two")
    assert not Profile(model="a").load(StepCost())
    monkeypatch.setattr(profile_module, "load", lambda: None)
    assert not Profile(model="a").load(StepCost()) and Profile(model="a").facts["build"] == ""


def test_a_profile_is_found_by_the_same_model_and_machine_alone(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    known, again = measured(), StepCost()
    facts: dict[str, Any] = {"model": "a", "machine": "b", "threads": 2}
    assert not Profile(**facts).load(again)
    Profile(**facts).save(known)
    for name in facts:
        assert not Profile(**facts | {name: "other"}).load(again) and not again.measured
    assert Profile(**facts).load(again)
    assert [again(rows) for rows in (1, 3, 8)] == pytest.approx([known(rows) for rows in (1, 3, 8)], rel=0.01)
    assert again.knows(5) and again.prompt_seconds(64, 64 * 32.0) == pytest.approx(
        known.prompt_seconds(64, 64 * 32.0), rel=0.05)


BROKEN = ["", "{", "[]", "7", '{"facts": {}}', '"x"', "[" * 10_000]


@pytest.mark.parametrize("text", [*BROKEN, "nan", "negative", "empty", "huge", "huge row"])
def test_a_broken_profile_is_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    profile, cost = Profile(model="a"), StepCost()
    profile.save(measured())
    document = json.loads(profile.path.read_text())
    if text == "nan":
        document["cost"]["table"]["1"] = float("nan")
    elif text == "negative":
        document["cost"]["context"] = -1.0
    elif text == "huge":
        document["cost"]["context"] = 10 ** 400
    elif text == "huge row":
        document["cost"]["table"]["1" + "0" * 400] = 1.0
    elif text == "empty":
        document["cost"]["table"] = {}
    profile.path.write_text(text if text in BROKEN else json.dumps(document))
    assert not profile.load(cost) and not cost.measured


def of_revision(revision: str) -> Engine:
    options = EngineOptions.of(kv_blocks=100, block_size=8, max_num_seqs=4, max_model_len=128)
    return engine_for(tiny_model(), None, options, device=torch.device("cpu"), revision=revision)


def test_a_server_warms_up_once_and_knows_it_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    first = of_revision("r")
    first.warm_up()
    assert not first.profiled and first.cost.knows(2)
    second = of_revision("r")
    assert second.profiled and second.cost.knows(2)
    assert not of_revision("other").profiled


def test_nobody_else_steps_the_engine_while_it_warms_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take is measured by steps: an engine's thread beside them would take up half of a request."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    stepped: set[str] = set()
    step = Engine.step

    def noted(engine: Engine) -> object:
        stepped.add(threading.current_thread().name)
        return step(engine)

    monkeypatch.setattr(Engine, "step", noted)
    llm = AsyncLLM(engine=of_revision("r"), warm_up=True)
    try:
        assert stepped == {threading.current_thread().name} and llm.engine.cost.knows(2)
        out = asyncio.run(llm.complete([1, 2, 3], SamplingParams(max_tokens=3)))
        assert len(out.outputs[0].token_ids) == 3 and llm.alive
    finally:
        llm.close()


def test_where_nothing_can_be_written_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    Profile(model="a").save(measured())
    assert not Profile(model="a").load(StepCost())


def test_a_user_without_a_home_has_an_engine_and_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    engine = of_revision("r")
    engine.profile.save(measured())
    assert not engine.profiled
