"""--texts: heads of every kind learn from the answers that another run made, and none are made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.training import checkpoints, generate, trainer
from paceline.training.__main__ import main
from paceline.training.clock import Clock
from paceline.training.news import News
from paceline.training.run import train
from paceline.training.supply import Supply


def quiet(news: News) -> None:
    pass


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def given(options: Any, begun_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Options of a run on the texts of `begun_folder`, in which nothing may be made."""

    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError("answers are made")

    monkeypatch.setattr(Supply, "__post_init__", refuse)
    monkeypatch.setattr(generate.AnswerMaker, "__init__", refuse)
    return lambda kind="dspark", **changes: options(kind, **{
        "data": (), "texts": begun_folder, "out": tmp_path / kind, "prompt_tokens": 7, "new_tokens": 9} | changes)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "mtp", "medusa", "hydra", "draft"])
def test_every_kind_learns_from_texts_of_another_run(given: Any, begun_folder: Path, kind: str) -> None:
    before = files_of(begun_folder)
    chosen = given(kind, steps=3, layers=1 if kind == "draft" else None)
    report = train(chosen, quiet)
    made = json.loads(before["report.json"])
    assert report["steps"] == 3 and report["texts"] == made["texts"] == 12
    assert report["answer_tokens"] == made["answer_tokens"] and report["generated_tokens_per_second"] == 0.0
    assert files_of(begun_folder) == before and not (chosen.out / "data").exists()
    assert (chosen.out / ("model" if kind == "draft" else "head")).is_dir()


def test_it_is_as_if_the_texts_had_been_made(given: Any, begun_folder: Path) -> None:
    """The very same weights, for the same steps on the same texts; `OUT/data` may be named too."""
    chosen = given(steps=1, texts=begun_folder / "data")
    train(chosen, quiet)
    one, other = (torch.load(folder / checkpoints.NAME, weights_only=True) for folder in (begun_folder, chosen.out))
    assert one["ids"] == other["ids"] and one["pool"] == other["pool"]
    assert all(torch.equal(tensor, other["network"][name]) for name, tensor in one["network"].items())


def test_all_minutes_are_for_learning_and_a_run_goes_on(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that nothing but a step moves on."""
    now, step = [0.0], trainer.Trainer.train_step

    def steps(self: Any, progress: float) -> Any:
        now[0] += 10.0
        return step(self, progress)

    monkeypatch.setattr(Clock, "elapsed", property(lambda self: now[0]))
    monkeypatch.setattr(trainer.Trainer, "train_step", steps)
    heard: list[News] = []
    report = train(given(steps=None, minutes=0.5, log_steps=1), heard.append)
    assert {news.stage for news in heard} == {"training", "measured"} and report["steps"] == 3
    assert train(given(steps=None, minutes=1.0), quiet)["steps"] == 6
    with pytest.raises(ConfigError, match=r"before the first step.*more --minutes"):
        train(given(steps=None, minutes=0.5, out=given().out / "other"), quiet)


def test_pruning_sees_prompts_and_learns_from_texts(given: Any, prompts: Path) -> None:
    report = train(given("prune", steps=2, layers=2, data=(prompts,)), quiet)
    assert report["steps"] == 2 and report["texts"] == 12


def damaged(folder: Path, part: str, name: str = "manifest.json") -> Path:
    return folder / "data" / part / name


def cut_short(folder: Path) -> None:
    path = damaged(folder, "texts", "shard-00000.npz")
    path.write_bytes(path.read_bytes()[:-9])


def scrambled(folder: Path) -> None:
    path = damaged(folder, "held_out", "shard-00000.npz")
    path.write_bytes(bytes(path.stat().st_size))


def another(name: str) -> Any:
    def change(folder: Path) -> None:
        manifest = damaged(folder, "texts")
        manifest.write_text(manifest.read_text().replace(f'"{name}": "', f'"{name}": "not-'))

    return change


def emptied(folder: Path) -> None:
    manifest = damaged(folder, "texts")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"shards": []}))


@pytest.mark.parametrize(("damage", "says"), [
    (cut_short, r"shard-00000.npz is missing or cut short: copy it again"),
    (scrambled, "A shard in .* cannot be read"),
    (another("revision"), r"another target's \(revision\).*--model"),
    (another("tokenizer"), r"another target's \(tokenizer\)"),
    (emptied, "has 0 answers to learn from"),
    (lambda folder: damaged(folder, "held_out").unlink(), "holds no answers"),
    (lambda folder: damaged(folder, "texts").write_text("{"), "cannot be read"),
    (lambda folder: shutil.rmtree(folder / "data"), "holds no answers"),
    (lambda folder: damaged(folder, "texts").write_text('{"settings": {}, "shards": []}'), "how long its texts"),
])
def test_texts_that_cannot_be_learned_from(given: Any, begun_folder: Path, tmp_path: Path, damage: Any,
                                           says: str) -> None:
    other = shutil.copytree(begun_folder, tmp_path / "other")
    damage(other)
    with pytest.raises(ConfigError, match=says):
        train(given(texts=other), quiet)
    assert not (given().out / checkpoints.NAME).exists()


def test_texts_and_prompts_are_not_for_one_run(given: Any, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ({"data": (prompts,)}, {"self_made": 5}):
        with pytest.raises(ConfigError, match="no use beside them"):
            train(given(**more), quiet)
    chosen = given()
    assert main(["mtp", "--model", chosen.model, "--texts", str(chosen.texts), "--out", str(chosen.out), "--steps", "1",
                 "--device", "cpu", "--draft-vocab", "64", "--batch-tokens", "300"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 12
    assert np.isfinite(json.loads((chosen.out / "report.json").read_text())["measured"][-1]["by_position"]).all()
