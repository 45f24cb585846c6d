"""Files that somebody made to break things: each is read, or refused with a sentence, in little time and memory.

A case is a subject and a seed, and the same one every time. `corpus` holds files that once broke something, each in a
folder <subject>/<what it was>, to be put over the subject's valid ones. Run by hand, for other seeds, or to keep one:

    python tests/fuzz/test_hostile_files.py gguf-llama 1000 2000 [--keep]
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hostile import SUBJECTS, Files, written

from paceline.errors import PacelineError

CORPUS = Path(__file__).parent / "corpus"
FEW, MANY = 6, 400
MOST_SECONDS = 20
"""Of this process' own computing. A hostile file takes a few milliseconds, a template at its limits a second."""
MOST_KILOBYTES = 700_000
"""By which all cases of a subject may make the process larger."""


@contextmanager
def limited() -> Iterator[None]:
    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"a file kept the process busy for {MOST_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def case(subject: str, seed: int) -> Files:
    """The files of a seed."""
    found = SUBJECTS[subject]
    return found.mutated(dict(found.valid()), random.Random(f"{subject} {seed}"))


def read(subject: str, folder: Path, files: Files) -> str:
    """What became of it: '' where it was read, else the sentence. Anything but a PacelineError gets out."""
    written(folder, files)
    try:
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SUBJECTS[subject].read(folder)
    except PacelineError as error:
        return str(error)
    return ""


def check(subject: str, folder: Path, seeds: range) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        said = read(subject, folder, case(subject, seed))
        assert len(said) < 3000, f"seed {seed}: nobody reads a message of {len(said)} characters"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KILOBYTES


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_valid_file_is_read(subject: str, tmp_path: Path) -> None:
    assert read(subject, tmp_path / "m", SUBJECTS[subject].valid()) == ""


@pytest.mark.parametrize("subject", SUBJECTS)
def test_hostile_files(subject: str, tmp_path: Path) -> None:
    check(subject, tmp_path / "m", range(FEW))


@pytest.mark.full
@pytest.mark.parametrize("subject", SUBJECTS)
def test_many_hostile_files(subject: str, tmp_path: Path) -> None:
    check(subject, tmp_path / "m", range(FEW, MANY))


@pytest.mark.parametrize("kept", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_something(kept: Path, tmp_path: Path) -> None:
    subject = kept.parent.name
    files = dict(SUBJECTS[subject].valid()) | {path.name: path.read_bytes() for path in kept.iterdir()}
    assert read(subject, tmp_path / "m", files), "it should be refused"


def test_a_case_is_the_same_every_time() -> None:
    for subject in ("gguf-llama", "config", "template", "safetensors"):
        assert case(subject, 3) == case(subject, 3) != case(subject, 4)


if __name__ == "__main__":
    name, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(first, last):
            files = case(name, seed)
            try:
                read(name, Path(scratch) / "m", files)
            except BaseException as error:
                last_line = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{type(error).__name__} at {last_line.filename}:{last_line.lineno}: {str(error)[:150]}"
                if place not in seen:
                    seen.add(place)
                    print(f"{name} {seed}: {place}", flush=True)
                    if "--trace" in sys.argv:
                        traceback.print_exc()
                    if "--keep" in sys.argv:
                        valid = SUBJECTS[name].valid()
                        written(CORPUS / name / f"seed-{seed}", {
                            part: content for part, content in files.items() if content != valid.get(part)})
                if isinstance(error, KeyboardInterrupt):
                    raise
    print(f"{name}: {last - first} seeds, {len(seen)} faults")
