"""One small target and its prompts for all tests of training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_targets

from paceline.training.news import News
from paceline.training.options import TrainOptions
from paceline.training.run import train

BEGUN: dict[str, Any] = {"steps": 1, "answers": 12}


def made(target: Path, prompts: Path, kind: str, **changes: Any) -> TrainOptions:
    usual: dict[str, Any] = {
        "model": str(target), "data": (prompts,), "new_tokens": 48, "prompt_tokens": 48,
        "temperatures": (0.0, 1.0), "held_out": 6, "answers": 40, "batch_tokens": 384, "anchors": 10, "draft_vocab": 96,
        "markov_rank": 8, "block": 4, "depth": 3, "lr": 4e-3, "warmup": 10, "steps": 8, "device": "cpu",
        "target_rows": 512, "log_steps": 4, "save_seconds": 600.0, "evaluate_seconds": 600.0, "concurrent": 48}
    return TrainOptions(kind=kind, **usual | changes)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_targets.write_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_targets.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture
def options(target_folder: Path, prompts: Path, tmp_path: Path) -> Any:
    """Options for a run of seconds; what is given replaces them."""

    def make(kind: str = "dspark", **changes: Any) -> TrainOptions:
        return made(target_folder, prompts, kind, **{"out": tmp_path / "head"} | changes)

    return make


@pytest.fixture(scope="session")
def begun_folder(target_folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begun") / "head"
    train(made(target_folder, prompts, "dspark", out=out, **BEGUN), lambda news: None)
    return out


@pytest.fixture
def begun(begun_folder: Path, options: Any) -> Any:
    """Options of a run that has taken one step, and goes on in a folder of its own; what is given replaces them."""
    shutil.copytree(begun_folder, options().out)
    return lambda **changes: options(**BEGUN | changes)


@pytest.fixture
def heard() -> list[News]:
    return []
