"""A disk that is full after so many bytes: what was there before stays, nothing half written is left, and the message
says what to do."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny import tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.cli.generate import write_trace
from paceline.errors import PacelineError
from paceline.models.heads.formats.write import write_head
from paceline.models.load import compensation
from paceline.speculation.datastore import write_datastore
from paceline.training import checkpoints
from paceline.training.shards import replace_file
from speculation.trained_heads import head_config, random_tensors


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes: the system refuses, whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _trace(folder: Path, number: int) -> None:
    params = SamplingParams(max_tokens=8 + number, trace=True, seed=number)
    write_trace(tiny_llm().generate([[1, 2, 3]], params)[0], folder / "one.json")


def _checkpoint(folder: Path, number: int) -> None:
    checkpoints.save(folder, {"settings": {}, "weights": torch.full((3000,), float(number))})


def _datastore(folder: Path, number: int) -> None:
    write_datastore(folder / "some.store", [[number, 2, 3] * 2000], 97)


def _head(folder: Path, number: int) -> None:
    config = head_config("eagle3", tiny_model())
    tensors = {name: tensor + number if tensor.is_floating_point() else tensor
               for name, tensor in random_tensors(config).items()}
    write_head(folder / "head", config, tensors, replace=True)


def _compensation(folder: Path, number: int) -> None:
    luck = np.random.default_rng(number)
    compensation.write(folder / "some.npz", {"site": luck.random((20, 32, 32), dtype=np.float32)})


def _shard(folder: Path, number: int) -> None:
    replace_file(folder / "shard.npz", lambda path: path.write_bytes(bytes([number]) * 9000))


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "trace": _trace, "checkpoint": _checkpoint, "datastore": _datastore, "head": _head, "shard": _shard,
    "compensation": _compensation}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [0, 100, 1000])
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_harms_nothing_that_was_there(name: str, size: int, tmp_path: Path) -> None:
    write: Any = WRITERS[name]
    write(tmp_path, 1)
    before = contents(tmp_path)
    assert before
    with pytest.raises((PacelineError, OSError)) as caught, room_for(size):
        write(tmp_path, 2)
    assert contents(tmp_path) == before
    if name not in ("datastore", "compensation"):  # those are told by who asked for them
        assert isinstance(caught.value, PacelineError)
    write(tmp_path, 2)
    assert contents(tmp_path) != before and contents(tmp_path).keys() == before.keys()
