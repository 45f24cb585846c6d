"""Whole runs: they learn, go on bit by bit as if never stopped, and leave nothing half-written behind."""

from __future__ import annotations

import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.models.heads.formats.read import read_head
from paceline.models.heads.formats.write import write_head
from paceline.request import SamplingParams
from paceline.training import checkpoints, interrupts, rehearsal, supply, trainer
from paceline.training.__main__ import main
from paceline.training.clock import Clock
from paceline.training.interrupts import Interrupted
from paceline.training.networks.slots import SlotHead
from paceline.training.news import News
from paceline.training.run import Run, train
from paceline.training.shards import Shards
from paceline.training.supply import Supply

FAMILY = Path(__file__).parents[1] / "family"


def quiet(news: News) -> None:
    pass


def state_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / checkpoints.NAME, weights_only=True)


def test_a_head_learns_its_target(options: Any) -> None:
    """Much of what follows is foreseen: far more than any token that comes often."""
    chosen = options(steps=50, answers=60, batch_tokens=512, anchors=16, held_out=10)
    heard: list[News] = []
    report = train(chosen, heard.append)
    assert report["tokens_per_cycle"]["3"] > 1.6, report["by_position"]
    assert report["curve"][-1]["loss"] < 0.8 * report["curve"][0]["loss"]
    assert {news.stage for news in heard} == {"answers", "training", "measured"}
    assert 0.6 < report["coverage"] <= 1.0 and report["tokens_learned_from"] > report["answer_tokens"]
    written = json.loads((chosen.out / "report.json").read_text())
    assert written["tokens_per_cycle"] == report["tokens_per_cycle"]
    assert (chosen.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    tensors = load_file(chosen.out / "head" / "model.safetensors")
    assert tensors["markov_head.markov_w1.weight"].shape[1] == 8 and tensors["d2t"].shape == (96,)
    assert json.loads((chosen.out / "head" / "config.json").read_text())["speculators_model_type"] == "dspark"


def test_a_run_goes_on_as_if_never_stopped(options: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = options(steps=20, ema=0.9)
    train(whole, quiet)
    parts = options(steps=20, ema=0.9, out=tmp_path / "parts")
    steps = trainer.Trainer.train_step

    def stopping(self: Any, progress: float) -> Any:
        told = steps(self, progress)
        if self.step == 10:
            signal.raise_signal(signal.SIGTERM)
        return told

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", stopping)
        with pytest.raises(Interrupted, match="at step 10"):
            train(parts, quiet)
    assert (parts.out / "head").exists() and state_of(parts.out)["step"] == 10
    assert json.loads((parts.out / "report.json").read_text())["steps"] == 10
    train(parts, quiet)
    one, other = state_of(whole.out), state_of(parts.out)
    assert one["step"] == other["step"] == 20 and one["tokens"] == other["tokens"] and one["pool"] == other["pool"]
    for name, tensor in one["network"].items():
        assert torch.equal(tensor, other["network"][name]), name
    for place, moments in one["optimizer"]["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, other["optimizer"]["state"][place][name])
    assert all(map(torch.equal, one["average"], other["average"]))
    written = load_file(whole.out / "head" / "model.safetensors"), load_file(parts.out / "head" / "model.safetensors")
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_prompts_that_the_target_makes_are_made_once(options: Any, monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path) -> None:
    """A run that was broken off behind them, and once more while it learned, ends with the weights of one that was
    not."""
    make, steps = supply.make_prompts, trainer.Trainer.train_step
    made: list[int] = []

    def counted(llm: LLM, count: int, *given: Any) -> list[str]:
        made.append(count)
        return make(llm, count, *given)

    def stop(news: News) -> None:
        if news.text == "16 prompts by the target itself":
            signal.raise_signal(signal.SIGTERM)

    def stopping(self: Any, progress: float) -> Any:
        told = steps(self, progress)
        if self.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return told

    monkeypatch.setattr(supply, "make_prompts", counted)
    whole, parts = (options(data=(), self_made=16, answers=12, steps=4, out=tmp_path / name)
                    for name in ("whole", "parts"))
    train(whole, quiet)
    with pytest.raises(Interrupted, match="answers so far"):
        train(parts, stop)
    one, other = ((chosen.out / "data" / supply.SELF_MADE).read_text() for chosen in (whole, parts))
    assert one == other and len(set(one.splitlines())) >= 8 and made == [16, 16]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", stopping)
        with pytest.raises(Interrupted, match="at step 2"):
            train(parts, quiet)
    assert train(parts, quiet)["steps"] == 4 and (parts.out / "head").is_dir()
    assert made == [16, 16]
    before, after = state_of(whole.out), state_of(parts.out)
    assert before["ids"] == after["ids"] and before["pool"] == after["pool"]
    assert all(torch.equal(tensor, after["network"][name]) for name, tensor in before["network"].items())


def test_an_interrupt_while_answers_are_made(options: Any, tmp_path: Path) -> None:
    chosen, before = options(), signal.getsignal(signal.SIGINT)

    def stop(news: News) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supply, "TURN", 0.2)
        with pytest.raises(Interrupted, match="answers so far"):
            train(chosen, stop)
    assert signal.getsignal(signal.SIGINT) is before
    report = train(chosen, quiet)
    assert report["texts"] == 40 and report["steps"] == 8


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupts.watched() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            assert stop.raised
        monkeypatch.setattr(interrupts, "SAME", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_full_disk_leaves_the_checkpoint_before(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(options(), quiet)
    folder = options().out
    before = (folder / checkpoints.NAME).read_bytes()
    written = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, data: Any) -> None:
            self._file.write(bytes(data[:1000]))
            raise OSError(28, "No space left on device")

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = written(self, mode, *args, **kwargs)
        return Full(file) if mode == "wb" and checkpoints.NAME in self.name else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ConfigError, match="No space left on device"):
        checkpoints.save(folder, state_of(folder))
    monkeypatch.undo()
    assert (folder / checkpoints.NAME).read_bytes() == before
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("damage", "says"), [
    (lambda path: path.write_bytes(path.read_bytes()[:500]), "no whole checkpoint"),
    (lambda path: torch.save({"version": 0}, path), "not a checkpoint of this version"),
    (lambda path: None, "other settings \\(lr\\)"),
])
def test_checkpoints_that_cannot_be_gone_on_from(begun: Any, damage: Any, says: str) -> None:
    damage(begun().out / checkpoints.NAME)
    with pytest.raises(ConfigError, match=says):
        train(begun(steps=2, lr=1e-5), quiet)


def test_a_head_is_trained_further(options: Any, tmp_path: Path) -> None:
    first = options(steps=6)
    train(first, quiet)
    begun = options(steps=1, out=tmp_path / "further", init=first.out, lr=1e-12)
    train(begun, quiet)
    one, other = (load_file(folder / "head" / "model.safetensors") for folder in (first.out, begun.out))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name])
    heard: list[News] = []
    with pytest.raises(ConfigError, match="--init: layers"):
        train(options(steps=1, out=tmp_path / "wider", init=first.out, intermediate=40), heard.append)
    with pytest.raises(PacelineError, match="has no config"):
        train(options(steps=1, out=tmp_path / "none", init=tmp_path), heard.append)
    assert not heard  # before anything else was done


def test_a_packaged_head_is_trained_further(options: Any, tmp_path: Path) -> None:
    """Its weights are int8, and its shape need not be said again."""
    first = options(steps=4, intermediate=40, taps=(1, 3), layers=1)
    train(first, quiet)
    target = LLM(first.model, device="cpu", kernels="eager", max_model_len=64).engine.model.config
    whole = read_head(first.out / "head", target)
    write_head(tmp_path / "packaged", whole.config, whole.tensors, storage="int8")
    packaged = read_head(tmp_path / "packaged", target)
    again = options(steps=1, out=tmp_path / "further", init=tmp_path / "packaged", lr=1e-12)
    train(again, quiet)
    further = read_head(again.out / "head", target)
    assert further.config.taps == (1, 3) and further.config.intermediate_size == 40 and further.config.num_layers == 1
    for name, tensor in packaged.tensors.items():
        torch.testing.assert_close(further.tensors[name].float(), tensor.float(), rtol=1e-3, atol=1e-4, msg=name)
    assert any(not torch.equal(tensor.float(), whole.tensors[name].float()) for name, tensor in further.tensors.items())
    assert train(replace(again, steps=2), quiet)["steps"] == 2  # goes on from its checkpoint


def test_texts_of_other_prompts_are_refused(begun: Any, prompts: Path, tmp_path: Path) -> None:
    lines = prompts.read_text().splitlines()
    other = tmp_path / "other.jsonl"  # as many, but one of them another
    other.write_text("\n".join([*lines[:-1], json.dumps({"prompt": "bee hill hill hill"})]) + "\n")
    with pytest.raises(ConfigError, match="other settings \\(prompts\\)"):
        train(begun(data=(other,)), quiet)


def test_a_checkpoint_without_its_texts_is_refused(begun: Any) -> None:
    shutil.rmtree(begun().out / "data")
    heard: list[News] = []
    with pytest.raises(ConfigError, match=r"learned from 12 texts.*bring the folder back"):
        train(begun(steps=2), heard.append)
    assert not heard


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp", "medusa", "hydra"])
def test_what_is_measured_is_what_the_engine_gets(options: Any, kind: str) -> None:
    """Every kind of the tiny family: trained further by next to nothing, written, loaded, and asked to draft for the
    held-out prompts."""
    depth = 3 if kind in ("medusa", "hydra") else 5
    chosen = options(kind, model=str(FAMILY / "target"), init=FAMILY / kind, steps=1, lr=1e-12, answers=4, depth=depth,
                     block=7, markov_rank=32)
    heard: list[News] = []
    report = train(chosen, heard.append)
    assert any("output matrices of its own" in news.text for news in heard) == (kind in ("medusa", "hydra"))
    assert len(report["by_position"]) == (7 if kind == "dspark" else depth)
    assert report["tokens_per_cycle"]["3"] > 1.1
    wish = {"method": kind, "head": str(chosen.out / "head"), "k": 3, "adaptive": False}
    llm = LLM(chosen.model, device="cpu", kernels="eager", max_model_len=96, speculation=wish)
    folder = chosen.out / "data" / "held_out"
    settings = json.loads((folder / "manifest.json").read_text())["settings"]
    cycles = tokens = 0
    for text in Shards(folder, settings, 1024).read():
        output, = llm.generate(text.tokens[:text.prompt].tolist(), SamplingParams(max_tokens=48, temperature=0.0))
        assert output.outputs[0].token_ids == text.tokens[text.prompt:].tolist() and output.speculation is not None
        cycles, tokens = cycles + output.speculation.cycles, tokens + output.speculation.emitted
    assert tokens / cycles == pytest.approx(report["tokens_per_cycle"]["3"], rel=0.02)
    with pytest.raises(ConfigError, match=f"holds a {kind} head"):
        other = "eagle3" if kind == "dspark" else "dspark"
        train(options(other, model=chosen.model, init=chosen.out, out=chosen.out / "other"), quiet)


def test_a_draft_model_is_distilled(options: Any) -> None:
    """It begins with layers of the target, learns, and drafts for it in the engine."""
    chosen = options("draft", steps=40, layers=2, batch_tokens=512, anchors=20)
    report = train(chosen, quiet)
    assert report["tokens_per_cycle"]["3"] > 2.0
    llm = LLM(chosen.model, device="cpu", kernels="reference", max_model_len=96,
              speculation={"method": "draft", "model": str(chosen.out / "model"), "k": 3, "adaptive": False})
    output, = llm.chat([{"role": "user", "content": "fox river hill"}], SamplingParams(max_tokens=40, temperature=0.0))
    assert output.speculation is not None and output.error is None
    assert output.speculation.accepted > 8
    with pytest.raises(ConfigError, match="--init is for heads"):
        train(options("draft", init=chosen.out, out=chosen.out / "other"), quiet)


def test_a_rehearsal_finds_what_would_fail(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options()
    heard: list[News] = []

    def rehearse(self: Run, *given: Any) -> None:
        rehearsal.rehearse(self.factory, self.show)
        raise ZeroDivisionError

    monkeypatch.setattr(Run, "_open", rehearse)
    with pytest.raises(ZeroDivisionError):
        train(chosen, heard.append)
    assert [news.stage for news in heard] == ["rehearsal"] * 2 and all("works: " in news.text for news in heard)
    assert "4 texts of 96 tokens" in heard[0].text and "12 texts of 32 tokens" in heard[1].text


def test_minutes_alternate_between_answers_and_steps(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "TURN", 0.1)
    heard: list[News] = []
    report = train(options(steps=None, minutes=0.07, answers=5000, first_answers=10, log_steps=1, save_seconds=1.0,
                           evaluate_seconds=1.0), heard.append)
    stages = [news.stage for news in heard]
    first = stages.index("training")
    assert "answers" in stages[:first] and "answers" in stages[first:] and "measured" in stages
    assert report["texts"] > 10 and report["steps"] > 1


def test_first_answers_leave_time_to_learn(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a turn with answers and a step move on."""
    now, turn, step = [0.0], Supply.turn, trainer.Trainer.train_step

    def answers(self: Supply) -> None:
        turn(self)
        now[0] += 20.0 if self.held.finished and self.pool.texts else 0.0

    def steps(self: Any, progress: float) -> Any:
        now[0] += 10.0
        return step(self, progress)

    monkeypatch.setattr(supply, "TURN", 0.1)
    monkeypatch.setattr(Clock, "elapsed", property(lambda self: now[0]))
    monkeypatch.setattr(Supply, "turn", answers)
    monkeypatch.setattr(trainer.Trainer, "train_step", steps)
    report = train(options(steps=None, minutes=2.0, answers=5000, first_answers=5000, generate_share=0.0), quiet)
    assert report["steps"] == 8 and 0 < report["texts"] < 5000  # 30 % of 120 s are over after two turns


def test_too_little_time_is_said_and_no_head_is_written(options: Any) -> None:
    chosen = options(steps=None, minutes=1e-4)
    with pytest.raises(ConfigError, match=r"before the first step.*more --minutes, or fewer --first-answers"):
        train(chosen, quiet)
    assert not (chosen.out / "head").exists() and not (chosen.out / checkpoints.NAME).exists()


@pytest.mark.parametrize(("changes", "says"), [
    ({"data": ()}, "nothing to train on"),
    ({"steps": None}, "how long"),
    ({"minutes": 1.0}, "cannot be combined"),
    ({"lr": 0.0}, "--lr must be more than 0"),
    ({"block": 0}, "--block must be at least 1"),
    ({"temperatures": ()}, "--temperatures"),
    ({"temperatures": (-1.0,)}, "--temperatures"),
    ({"generate_share": 2.0}, "--generate-share"),
    ({"workers": -1}, "--workers must be at least 0"),
    ({"taps": (3, 1)}, "--taps"),
    ({"taps": (9,)}, "--taps"),
    ({"device": "tpu"}, "--device"),
    ({"kind": "wish"}, "no training of 'wish'"),
])
def test_options_that_cannot_work(options: Any, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(options(**changes), quiet)


def test_the_command_without_terminal_libraries(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options()
    arguments = ["dspark", "--model", chosen.model, "--data", str(chosen.data[0]), "--out", str(chosen.out), "--steps",
                 "2", "--answers", "12", "--new-tokens", "30", "--temperatures", "0,1", "--device", "cpu", "--block",
                 "3", "--draft-vocab", "64", "--held-out", "4", "--batch-tokens", "300", "--taps", "1,3"]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["steps"] == 2 and "answers" in told.err
    assert main([*arguments, "--taps", "1,2"]) == 1
    assert "other settings (taps)" in capsys.readouterr().err


def test_gradients_that_are_no_numbers_change_nothing(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may fail; what was learned is not lost, and means are those of the others."""
    learn = SlotHead.learn
    steps = iter(range(100))

    def broken(self: Any, *given: Any) -> Any:
        told = learn(self, *given)
        if next(steps) % 3 == 0:
            self.norm.weight.grad[0] = torch.nan
            told["loss"] = torch.tensor(torch.nan)
        return told

    monkeypatch.setattr(SlotHead, "learn", broken)
    chosen = options(steps=6, answers=12, log_steps=3)
    heard: list[News] = []
    report = train(chosen, heard.append)
    assert all(tensor.isfinite().all() for tensor in state_of(chosen.out)["network"].values())
    assert report["lost_steps"] == 2 and [entry["lost_steps"] for entry in report["curve"]] == [1, 1]
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["norm"]) for entry in report["curve"])
    assert "1 of 3 steps gave no numbers" in next(news.text for news in heard if news.stage == "training")


def test_a_loss_that_is_lost_for_good_ends_the_run(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = SlotHead.learn
    steps = iter(range(100))

    def broken(self: Any, *given: Any) -> Any:
        told = learn(self, *given)
        return told if next(steps) < good else told | {"loss": torch.tensor(torch.nan)}

    monkeypatch.setattr(SlotHead, "learn", broken)
    good = 4
    chosen = options(steps=12, answers=12, log_steps=3)
    with pytest.raises(ConfigError, match="no numbers any more at step 9"):
        train(chosen, quiet)
    assert state_of(chosen.out)["step"] == 9 and (chosen.out / "head").exists()
    assert json.loads((chosen.out / "report.json").read_text())["lost_steps"] == 5
    good = 0
    nothing = options(steps=2, answers=12, out=chosen.out / "nothing")
    with pytest.raises(ConfigError, match="no numbers any more at step 2"):
        train(nothing, quiet)
    assert not (nothing.out / "head").exists()
