"""Plans that run the engine: calibration on this machine, and acceptance on a user's prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import BASE, SHAPES, tiny_engine, tiny_llm, tiny_model
from paceline.cli import plan as command
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.plan.hardware import find_hardware
from paceline.plan.known import find_shape
from paceline.plan.measured import PROMPT, Timings, calibrate, flops_of, measure, time_engine
from paceline.plan.planner import Workload, plan
from paceline.plan.prompts import acceptance, at_hand, wish
from paceline.plan.report import as_dict, text
from paceline.plan.roofline import Roofline
from paceline.plan.speculation import expected_tokens

CONTEXT = 76


def timings_of(roofline: Roofline, *batches: int) -> Timings:
    return Timings({batch: roofline.decode(batch, CONTEXT) for batch in batches}, CONTEXT, roofline.prefill(PROMPT))


@pytest.mark.parametrize(("name", "dtype"), [("epyc-9654", "int8"), ("h200", "bfloat16")])
@pytest.mark.parametrize("batches", [(1, 4, 16, 64), (1,)])
def test_a_machine_is_recovered_from_what_it_took(name: str, dtype: str, batches: tuple[int, ...]) -> None:
    shape, machine = find_shape("llama-3.1-8b"), find_hardware(name)
    truth = Roofline(shape, machine.sustained(), dtype, "bfloat16")
    found = calibrate(shape, dtype, "bfloat16", machine, timings_of(truth, *batches))
    assert found.hardware.bandwidth == pytest.approx(truth.hardware.bandwidth, rel=1e-3)
    assert found.hardware.sustained() == found.hardware  # nothing is taken off what was measured
    assert [one.fitted for one in found.comparisons].count(True) == 2
    for one in found.comparisons:
        # Matrices and attention may have other arithmetic; a calibration has one figure for both.
        assert abs(one.error) < 0.02, one


def test_a_processor_that_computes_while_it_reads_is_known_by_a_few_rows() -> None:
    """As two Arm cores do: 5.3, 7.7, 13.9 and 51.7 ms for 1, 4, 8 and 32 rows."""
    shape = find_shape("smollm2-135m")
    took = {1: 0.0053, 4: 0.0077, 8: 0.0139, 32: 0.0517}
    found = calibrate(shape, "int8", "float16", find_hardware("epyc-9654"), Timings(took, CONTEXT, 0.08))
    assert found.hardware.overlap > 0.5
    assert all(abs(one.error) < 0.2 for one in found.comparisons[:-1]), found.comparisons


def test_a_processor_may_compute_half_of_it_while_it_reads() -> None:
    """As the same cores did on another day: 6.5, 9.5, 16.7 and 60.9 ms; three drafts then won 1.10x, 1.52x and 1.90x
    where 40, 60 and 80 of 100 were right, and 0.47x, 0.62x and 0.80x for eight at once."""
    shape = find_shape("smollm2-135m")
    took = {1: 0.0065, 4: 0.0095, 8: 0.0167, 32: 0.0609}
    found = calibrate(shape, "int8", "float16", find_hardware("epyc-9654"), Timings(took, CONTEXT, 0.088))
    assert 0.0 < found.hardware.overlap < 1.0
    assert all(abs(one.error) < 0.1 for one in found.comparisons[:-1]), found.comparisons
    roofline = Roofline(shape, found.hardware, "int8", "float16")
    for batch, won in {1: (1.10, 1.52, 1.90), 8: (0.47, 0.62, 0.80)}.items():
        cost = roofline.verify(batch, 4, CONTEXT) / roofline.decode(batch, CONTEXT)
        for chance, measured in zip((0.4, 0.6, 0.8), won):
            assert expected_tokens(chance, 3) / cost == pytest.approx(measured, rel=0.15)


def test_predictions_that_fail_are_shown() -> None:
    shape = find_shape("smollm2-135m")
    truth = timings_of(Roofline(shape, find_hardware("epyc-9654").sustained(), "int8", "float16"), 1, 8, 64)
    odd = replace(truth, decode={**truth.decode, 8: 2 * truth.decode[8]})
    found = calibrate(shape, "int8", "float16", find_hardware("epyc-9654"), odd)
    errors = {one.what: one.error for one in found.comparisons}
    assert errors["a step of 8 at once"] == pytest.approx(-0.5, abs=0.01)
    made = plan(shape, found, workload=Workload(batches=(1, 8)), dtype="int8", drafters=())
    assert "-50%" in text(made) and "fitted" in text(made)
    assert as_dict(made)["measured"][1]["error"] == errors["a step of 8 at once"]


@pytest.mark.parametrize("times", [{1: 1.0, 64: 64.5}, {1: 1.0, 64: 0.9}])
def test_times_that_only_one_thing_explains(times: dict[int, float]) -> None:
    """Nothing but arithmetic, or less time for more: both still give a machine that could be."""
    shape = find_shape("smollm2-135m")
    found = calibrate(shape, "int8", "float16", find_hardware("epyc-9654"), Timings(times, CONTEXT, 1.0)).hardware
    assert 0 < found.bandwidth < float("inf") and 0 < found.arithmetic("int8") < float("inf")


def test_steps_are_timed_by_the_engine_s_own_clock() -> None:
    """Every look at this clock is a second later, so a time is a count of what the engine did."""
    ticks = count()
    llm = LLM.from_engine(tiny_engine(clock=lambda: float(next(ticks)), max_batch_tokens=512))
    found = time_engine(llm, [1, 4, 1000])
    assert sorted(found.decode) == [1, 4]  # a thousand do not fit
    assert all(seconds > 0 for seconds in found.decode.values()) and found.prompt > 0


def test_an_engine_without_room_is_not_timed() -> None:
    with pytest.raises(ConfigError, match="no room"):
        time_engine(tiny_llm(max_model_len=64), [1])


def test_a_plan_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE | SHAPES["llama"]))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 2 3"}\n{"prompt": "4 5"}\n')
    from paceline.bench import spec

    monkeypatch.setattr(spec, "prompt_of", lambda llm, messages: [int(word) for word in
                                                                  messages[0]["content"].split()])
    asked: dict[str, Any] = {}

    def load(model: str, **options: Any) -> LLM:
        asked.update(options, model=model)
        return tiny_llm(max_batch_tokens=512)

    monkeypatch.setattr(command, "load_llm", load)
    assert main(["plan", str(folder), "--measured", "--prompts", str(tmp_path / "prompts.jsonl"), "--batch", "1,3",
                 "--context", "128", "--max-tokens", "24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert asked == {"model": str(folder), "enable_prefix_caching": False, "heads": None,
                     "threads": None, "max_num_seqs": None}
    assert found["hardware"]["calibrated"] and found["hardware"]["bandwidth"] > 0
    assert [one["what"] for one in found["measured"]] == [
        "a step of 1 at once", "a step of 3 at once", "a step of 4 at once", f"a prompt of {PROMPT} tokens"]
    assert [one["drafter"] for one in found["drafters"]] == ["ngram", "suffix"]
    assert all("of 2 prompts" in one["source"] for one in found["drafters"])


def test_a_simulation_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Steps take what the engine learned of its own, and prompts what its prompts took."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE | SHAPES["llama"]))
    monkeypatch.setattr(command, "load_llm", lambda model, **options: tiny_llm(max_batch_tokens=512))
    assert main(["plan", str(folder), "--measured", "--threads", "1", "--batch", "1", "--replicas", "2", "--routing",
                 "random", "--cores", "1", "--simulate", "poisson:rate=50,seconds=1,prompt=64,output=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"] == "measured steps, no speculation"
    assert found["fleets"][0]["ttft"]["50"] > 0.0 and found["fleets"][0]["tpot"]["50"] > 0.0


@pytest.mark.parametrize(("arguments", "said"), [
    (["--measured", "--hardware", "h100"], "leave --hardware out"),
    (["--prompts", "p.txt", "--acceptance", "0.5"], "leave one of them out"),
    (["--prompts", "/no/such/file"], "Cannot read")])
def test_contradictions_are_refused_before_a_model_is_loaded(arguments: list[str], said: str,
                                                             monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "load_llm", lambda *a, **k: pytest.fail("loaded a model"))
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_acceptance_is_what_the_engine_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that repeats itself is drafted well, and answers are those of plain decoding."""
    llm = tiny_llm(tiny_model())
    from paceline.bench import spec

    prompt = [5, 6, 7, 8] * 6
    monkeypatch.setattr(spec, "prompt_of", lambda llm, messages: prompt)
    found = acceptance(llm, ["ngram", "skip"], ["anything"], max_tokens=40, k=4)
    assert [one.drafter for one in found] == ["ngram", "skip"]
    for one in found:
        assert one.tokens == 39  # the first comes with the prompt
        assert 0.0 <= one.acceptance <= 1.0 and 1.0 <= one.tokens_per_step <= 5.0
    again = acceptance(llm, ["skip"], ["anything"], max_tokens=40, k=4)
    assert again[0] == found[1]


def test_drafters_at_hand() -> None:
    llm = tiny_llm()
    assert at_hand(llm) == ["ngram", "suffix"]
    assert wish(llm, "draft:some/model") == {"method": "draft", "model": "some/model", "k": 7, "adaptive": False}
    with pytest.raises(ConfigError, match="no eagle3 head"):
        wish(llm, "eagle3")


def test_an_engine_s_own_measure_makes_a_plan() -> None:
    from paceline.plan.read import read_shape

    shape = read_shape(BASE | SHAPES["llama"], "tiny")
    found = measure(tiny_llm(max_batch_tokens=512), shape, "float32", "float32", [1, 2])
    made = plan(shape, found, workload=Workload(context=128, batches=(1, 2)), dtype="float32")
    assert made.hardware.calibrated and made.rows[0].tpot_s == made.rows[0].floor_s


@pytest.mark.parametrize(("called", "name"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
                                              ("NVIDIA L40S", "l40s")])
def test_a_card_is_known_by_what_its_driver_calls_it(called: str, name: str) -> None:
    assert flops_of(called) == find_hardware(name).flops
    assert flops_of("Another Card 1") == {}


def test_a_card_that_only_read_has_the_arithmetic_of_its_kind() -> None:
    """A batch of 16 reads for longer than it computes: what it took says nothing of arithmetic."""
    shape, card = find_shape("llama-3.1-8b"), find_hardware("h200")
    truth = Roofline(shape, card.sustained(), "bfloat16", "bfloat16")
    found = calibrate(shape, "bfloat16", "bfloat16", card, timings_of(truth, 1, 4, 16)).hardware
    assert found.arithmetic("bfloat16") == pytest.approx(truth.hardware.arithmetic("bfloat16"))
    unknown = replace(card, flops={})
    found = calibrate(shape, "bfloat16", "bfloat16", unknown, timings_of(truth, 1, 4, 16)).hardware
    assert found.arithmetic("bfloat16") < truth.hardware.arithmetic("bfloat16")
