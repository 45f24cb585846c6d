"""One tiny model on disk and one server around it for all tests that need nothing special; processes for signals and
for the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ServerProcess, ServerThread, write_model

from paceline import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def offline(tiny_folder: Path) -> LLM:
    """The same model in this process: what the server should answer."""
    return LLM(str(tiny_folder), deterministic=True)


@pytest.fixture(scope="session")
def server(tiny_folder: Path) -> Iterator[ServerThread]:
    made = ServerThread(tiny_folder, deterministic=True)
    yield made
    made.stop()
    assert "Traceback" not in made.log()


@pytest.fixture
def start(tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Processes with a command line of their own."""
    made: list[ServerProcess] = []

    def begin(*arguments: str, **more: Any) -> ServerProcess:
        made.append(ServerProcess(tiny_folder, tmp_path / f"log{len(made)}", *arguments, **more))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.stop()
        assert "Traceback" not in one.log()
