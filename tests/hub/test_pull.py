"""Pulling: every way in which a download can go wrong, and none in which half a file looks whole."""

from __future__ import annotations

import errno
import io
import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hub.conftest import GGUF
from hub.stand_in import StandIn
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError
from paceline.hub import download
from paceline.hub.client import MOST_TRIES, Hub, _further
from paceline.hub.names import HubName
from paceline.hub.pull import pull
from paceline.hub.store import MANIFEST, find_local, local_models, pulled_folder, remove

NAME = HubName("owner/name", "Q4_K_M")


class Waits(list[float]):
    """How long somebody would have slept."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


def client(hub: StandIn, waits: Waits, **more: Any) -> Hub:
    return Hub(hub.url, sleep=waits, **more)


def folder() -> Path:
    return pulled_folder(NAME, "Q4_K_M")


def assert_nothing_whole() -> None:
    assert find_local(NAME) is None and not list(folder().glob("[!.]*"))


# -- what is fetched ------------------------------------------------------------------------------------------------

def test_the_file_of_a_quantisation(hub: StandIn) -> None:
    heard: list[tuple[str, int, int]] = []
    path = pull("owner/name:q4_k_m", progress=lambda *event: heard.append(event))
    assert path.name == "model-Q4_K_M.gguf" and path.read_bytes() == GGUF and find_local(NAME) == path
    assert heard[0] == ("download", 0, len(GGUF)) and heard[-1] == ("download", len(GGUF), len(GGUF))
    assert {file.name for file in path.parent.iterdir()} == {path.name, ".pulled.json", ".lock"}
    hub.asked.clear()
    assert pull("owner/name:Q4_K_M") == path
    assert not hub.count("cdn"), "it is here already"


def test_the_usual_quantisation_without_a_word(hub: StandIn) -> None:
    assert pull("owner/name").name == "model-Q4_K_M.gguf"
    del hub.files["model-Q4_K_M.gguf"]
    assert pull("owner/name").name == "model-Q8_0.gguf"


@pytest.mark.parametrize(("name", "said"), [
    ("owner/name:Q2_K", "no GGUF file of Q2_K: it has Q4_K_M, Q6_K, Q8_0"), ("owner/name:Q6_K", "in 2 parts"),
    ("owner/nothing", "has no 'owner/nothing': check the spelling"), ("no-such-model", "There is no model"),
    ("qwen-0.6b", "Did you mean qwen3-0.6b")])
def test_names_that_lead_nowhere(hub: StandIn, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        pull(name)
    assert not hub.count("cdn")


def test_a_repository_of_safetensors_over_several_pages(hub: StandIn) -> None:
    hub.page = 2
    hub.files = {"config.json": b"{}", "tokenizer.json": b"{ }", "model-00001-of-00002.safetensors": b"a" * 2000,
                 "model-00002-of-00002.safetensors": b"b" * 500, "model.safetensors.index.json": b"{}",
                 "consolidated.safetensors": b"ab" * 2000, "onnx/model.safetensors": b"o", "pytorch_model.bin": b"p",
                 "chat_template.jinja": b"{{ 1 }}", "x-Q8_0.gguf": GGUF}
    path = pull("owner/name")
    assert path == pulled_folder(NAME, "safetensors") == find_local(HubName("owner/name"))
    assert {file.name for file in path.glob("[!.]*")} == {
        "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "chat_template.jinja"}


def test_a_new_commit_replaces_what_has_changed(hub: StandIn) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"a" * 2000, "old.json": b"{}"}
    pull("owner/name")
    hub.asked.clear()
    hub.commit, hub.files = "d" * 40, {"config.json": b'{"x": 1}', "model.safetensors": b"a" * 2000}
    path = pull("owner/name")
    assert not hub.count("cdn") and (path / "config.json").read_bytes() == b'{"x": 1}'
    assert not (path / "old.json").exists()
    assert json.loads((path / MANIFEST).read_text())["commit"] == "d" * 40


# -- what goes wrong ------------------------------------------------------------------------------------------------

def test_a_download_that_breaks_goes_on_where_it_was(hub: StandIn, waits: Waits) -> None:
    hub.cut = [1000, 2000]
    assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == GGUF
    ranges = [one.headers.get("range") for one in hub.asked if one.at == "cdn"]
    assert ranges == [None, "bytes=1000-", "bytes=3000-"] and len(waits) == 2
    assert [one.headers.get("if-range") for one in hub.asked if one.at == "cdn"][1:] == ['"1"', '"1"']


def test_the_next_pull_goes_on_where_the_last_one_gave_up(hub: StandIn, waits: Waits) -> None:
    hub.cut = [4000, 0, 0, 0, 0, 0]
    with pytest.raises(ModelNotFoundError, match=r"5 times in a row \(the connection broke off\).*is kept"):
        pull(str(NAME), hub=client(hub, waits))
    assert_nothing_whole()
    hub.cut.clear()
    hub.asked.clear()
    assert pull(str(NAME)).read_bytes() == GGUF
    assert [one.headers.get("range") for one in hub.asked if one.at == "cdn"] == ["bytes=4000-"]


@pytest.mark.parametrize("change", ["another etag", "no ranges", "weak etag, another file"])
def test_what_has_changed_meanwhile_is_begun_anew(hub: StandIn, waits: Waits, change: str) -> None:
    hub.cut = [4000, 0, 0, 0, 0]
    with pytest.raises(ModelNotFoundError):
        pull(str(NAME), hub=client(hub, waits))
    if change == "another etag":
        hub.etag = '"2"'
    elif change == "no ranges":
        hub.ranges = False
    else:
        hub.commit, hub.files["model-Q4_K_M.gguf"] = "e" * 40, GGUF[::-1]
    hub.cut.clear()
    assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == hub.files["model-Q4_K_M.gguf"]


def test_a_range_of_another_file_is_not_appended(hub: StandIn, waits: Waits) -> None:
    """A server that ignores If-Range and answers 206 from something else."""
    hub.cut = [4000]
    real = download._continues
    seen: list[str | None] = []

    def continues(span: str | None, part: Any, etag: str | None) -> bool:
        seen.append(span)
        return real(f"bytes 17-99/{len(GGUF)}" if len(seen) == 1 else span, part, etag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "_continues", continues)
        assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == GGUF
    assert len(seen) == 1 and hub.count("cdn").total() == 3


@pytest.mark.parametrize("note", ["{}", "null", "[1]", "no"])
def test_a_note_of_a_part_that_is_damaged_begins_anew(hub: StandIn, waits: Waits, note: str) -> None:
    hub.cut = [5000] + [0] * MOST_TRIES
    with pytest.raises(ModelNotFoundError):
        pull(str(NAME), hub=client(hub, waits))
    (folder() / ".model-Q4_K_M.gguf.part.json").write_text(note)
    hub.cut = []
    assert pull(str(NAME)).read_bytes() == GGUF


def test_a_part_that_is_damaged_is_found_out(hub: StandIn, waits: Waits) -> None:
    hub.cut = [4000, 0, 0, 0, 0]
    with pytest.raises(ModelNotFoundError):
        pull(str(NAME), hub=client(hub, waits))
    hub.cut.clear()
    part = folder() / ".model-Q4_K_M.gguf.part"
    part.write_bytes(GGUF[:4000] + b"?" * (len(GGUF) - 4001))
    with pytest.raises(ModelFormatError, match="came damaged"):
        pull(str(NAME), hub=client(hub, waits))
    assert_nothing_whole()
    assert not part.exists(), "it would be damaged again"
    assert pull(str(NAME)).read_bytes() == GGUF


def test_a_range_that_is_not_there_begins_anew(hub: StandIn, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut = [4000]
    real, refused = Hub.open, []

    def answer(self: Hub, path: str, of: str, headers: dict[str, str] | None = None) -> Any:
        if headers and not refused:
            refused.append(headers)
            hub.answers = [(416, {})]
        return real(self, path, of, headers)

    monkeypatch.setattr(Hub, "open", answer)
    assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == GGUF
    assert refused and [one.headers.get("range") for one in hub.asked if one.at == "cdn"] == [None, None]


def test_a_wrong_checksum_is_refused(hub: StandIn) -> None:
    hub.lied["model-Q4_K_M.gguf"] = "0" * 64
    with pytest.raises(ModelFormatError, match="came damaged"):
        pull(str(NAME))
    assert_nothing_whole()


def test_more_than_was_announced_is_refused(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = hub.entry
    monkeypatch.setattr(hub, "entry", lambda path: honest(path) | {"size": 100})
    with pytest.raises(ModelFormatError, match=r"more of model-Q4_K_M\.gguf than the 100 bytes"):
        pull(str(NAME))
    assert_nothing_whole()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again_when_it_says(hub: StandIn, waits: Waits, status: int) -> None:
    hub.answers = [(status, {"Retry_After": "7"}), (status, {})]
    assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == GGUF
    assert waits == [7.0, 2.0]


def test_a_hub_that_wants_to_be_left_alone_is_not_waited_for(hub: StandIn, waits: Waits) -> None:
    hub.answers = [(429, {"Retry_After": "3600"})]
    with pytest.raises(ModelNotFoundError, match="left alone for 3600 s"):
        pull(str(NAME), hub=client(hub, waits))
    assert not waits


def test_a_hub_that_stays_broken_is_given_up(hub: StandIn, waits: Waits) -> None:
    hub.answers = [(502, {})] * 9
    with pytest.raises(ModelNotFoundError, match=r"could not be looked up.*5 times in a row \(it answered 502\)"):
        pull(str(NAME), hub=client(hub, waits))
    assert len(hub.asked) == 5


def test_offline_is_one_sentence_at_once(hub: StandIn, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not on this machine and the hub \(127.0.0.1:9\) cannot be reached"):
        pull(str(NAME), hub=Hub("http://127.0.0.1:9", sleep=waits))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        pull(str(NAME))
    assert not waits and not hub.asked


@pytest.mark.parametrize("endpoint", ["ftp://somewhere", "nowhere", "file:///etc", "http://127.0.0.1:none",
                                      "http://127.0.0.1:99999", "http://[::1", "http://me:hunter2@127.0.0.1"])
def test_an_endpoint_that_is_none(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match="HF_ENDPOINT") as refusal:
        pull(str(NAME))
    assert "hunter2" not in str(refusal.value)


def test_a_list_that_breaks_off_is_asked_for_again(hub: StandIn, waits: Waits) -> None:
    hub.cut_lists = [50, 0]
    assert pull(str(NAME), hub=client(hub, waits)).read_bytes() == GGUF
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "", "http://h:x/"])
def test_redirects_to_elsewhere_than_the_web_are_not_followed(hub: StandIn, location: str) -> None:
    hub.answers = [(302, {"Location": location})]
    with pytest.raises(ModelNotFoundError, match="not safe to follow"):
        pull(str(NAME))


def test_circles_end(hub: StandIn) -> None:
    hub.circles = True
    with pytest.raises(ModelNotFoundError, match="in circles"):
        pull(str(NAME))


def test_a_page_that_is_no_hub(hub: StandIn) -> None:
    hub.answers = [(200, {})]
    with pytest.raises(ModelNotFoundError, match="does not answer like a hub"):
        pull(str(NAME))


# -- tokens ---------------------------------------------------------------------------------------------------------

def test_the_token_goes_to_the_hub_and_to_nobody_else(hub: StandIn, monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hub.token = "hf_secret"
    with pytest.raises(ModelNotFoundError, match="HF_TOKEN"):
        pull(str(NAME))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull(str(NAME)).read_bytes() == GGUF
    sent = {one.at: one.headers.get("authorization") for one in hub.asked[-2:]}
    assert sent == {"hub": "Bearer hf_secret", "cdn": None}
    assert "hf_secret" not in caplog.text and "hf_secret" not in repr(Hub.of_environment())
    assert "hf_secret" not in (folder() / MANIFEST).read_text()


def test_a_redirect_on_the_hub_itself_keeps_the_token(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a repository that was renamed."""
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.answers = [(307, {"Location": "/api/models/owner/name/revision/main"})]
    with pytest.raises(ModelNotFoundError, match="owner/old"):  # its list is asked for under the old name
        pull("owner/old")
    assert [one.headers.get("authorization") for one in hub.asked[:2]] == ["Bearer hf_secret"] * 2
    with pytest.raises(ModelNotFoundError, match="not safe to follow"):
        _further("https://hub/x", "http://hub/x", "owner/name")


def test_a_wrong_token_is_not_told(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelNotFoundError, match="that this HF_TOKEN may read") as refusal:
        pull("owner/nothing")
    assert "hf_wrong" not in str(refusal.value)


def test_a_token_with_the_end_of_its_line(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", " hf_secret\r\n")
    assert pull(str(NAME)).read_bytes() == GGUF
    monkeypatch.setenv("HF_TOKEN", "hf_secret\rof two lines")
    with pytest.raises(ConfigError, match="HF_TOKEN holds") as refusal:
        pull(str(NAME))
    assert "hf_secret" not in str(refusal.value)


# -- names from the hub ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["../../x-Q4_K_M.gguf", "..\\x-Q4_K_M.gguf", "/etc/x-Q4_K_M.gguf", "a\0b-Q4_K_M.gguf",
                                  ".pulled-Q4_K_M.gguf", "a b-Q4_K_M.gguf", "C:x-Q4_K_M.gguf"])
def test_no_name_leads_out_of_the_folder(hub: StandIn, name: str, tmp_path: Path) -> None:
    hub.files = {name: GGUF}
    with pytest.raises(ModelFormatError, match="no file here shall be called"):
        pull(str(NAME))
    assert not hub.count("cdn")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [folder() / ".lock"]


def test_a_file_in_a_folder_of_the_hub_is_a_file_here(hub: StandIn) -> None:
    hub.files = {"Q4_K_M/model-Q4_K_M.gguf": GGUF}
    assert pull(str(NAME)) == folder() / "model-Q4_K_M.gguf"


def test_a_repository_cannot_be_named_out_of_the_cache() -> None:
    for name in ("../x", "a/..", "a/../b", "a//b", "a/b/c", "a/b:../c", "-a/b"):
        with pytest.raises(ModelNotFoundError, match="There is no model"):
            pull(name)


# -- disks, interrupts, company -------------------------------------------------------------------------------------

def test_a_disk_that_is_too_small_is_told_beforehand(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(ModelNotFoundError, match=r"cannot be stored.*0 MB are free.*PACELINE_CACHE"):
        pull(str(NAME))
    assert not hub.count("cdn")
    assert_nothing_whole()


class Full(io.FileIO):
    """A disk that is full after some bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 5000:
            super().write(bytes(data)[:5000 - self.tell()])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data) or 0


def test_a_disk_that_fills_up_leaves_no_file(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(download, "open", lambda path, mode: Full(path, mode.replace("b", "")), raising=False)
        with pytest.raises(ModelNotFoundError, match="No space left on device"):
            pull(str(NAME))
    assert_nothing_whole()
    assert pull(str(NAME)).read_bytes() == GGUF
    assert [one.headers.get("range") for one in hub.asked if one.at == "cdn"] == [None, "bytes=5000-"]


def test_an_interrupt_leaves_no_file(hub: StandIn) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(str(NAME), progress=interrupt)
    assert_nothing_whole()
    assert pull(str(NAME)).read_bytes() == GGUF


def test_an_update_that_breaks_off_while_files_move_is_not_whole(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"a" * 2000}
    pull("owner/name")
    hub.commit, hub.files = "d" * 40, {"config.json": b'{"x": 1}', "model.safetensors": b"b" * 2000}
    moves: list[Path] = []
    real = download.Part.move_to

    def move(part: download.Part, target: Path) -> None:
        moves.append(target)
        if len(moves) == 2:
            raise KeyboardInterrupt
        real(part, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(download.Part, "move_to", move)
        pull("owner/name")
    assert find_local(HubName("owner/name")) is None, "a mixture of two commits"
    path = pull("owner/name")
    assert (path / "model.safetensors").read_bytes() == b"b" * 2000


def test_two_at_once_fetch_once(hub: StandIn) -> None:
    hub.hold = threading.Event()
    stages: list[str] = []
    found: list[Path] = []

    def hear(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "wait" and hub.hold is not None:
            hub.hold.set()

    threads = [threading.Thread(target=lambda: found.append(pull(str(NAME), progress=hear))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and "wait" in stages and hub.count("cdn").total() == 1


# -- what is here ---------------------------------------------------------------------------------------------------

def test_a_file_that_was_cut_is_not_whole_and_is_fetched_again(hub: StandIn) -> None:
    path = pull(str(NAME))
    path.write_bytes(GGUF[:10])
    assert find_local(NAME) is None and [model.ready for model in local_models()] == [False]
    assert pull(str(NAME)).read_bytes() == GGUF


def test_removing(hub: StandIn, tmp_path: Path) -> None:
    pull("owner/name:Q4_K_M")
    pull("owner/name:Q8_0")
    with pytest.raises(ConfigError, match="more than once"):
        remove("owner/name")
    name, freed = remove("owner/name:Q8_0")
    assert name == "owner/name:Q8_0" and freed > 2 * len(GGUF)
    assert [model.name for model in local_models()] == ["owner/name:Q4_K_M"]
    remove("owner/name")
    assert not local_models() and not (tmp_path / "cache" / "models" / "hub" / "owner").exists()
    with pytest.raises(ModelNotFoundError, match="nothing of 'owner/name' to remove"):
        remove("owner/name")
    with pytest.raises(ModelNotFoundError, match="There is no model"):
        remove("../..")


def test_what_the_hubs_client_has_is_found_and_left_alone(hub: StandIn, tmp_path: Path) -> None:
    place = tmp_path / "hf" / "models--some--body" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text("abc")
    (place / "config.json").write_text("{}")
    assert find_local(HubName("some/body")) is None, "a config alone is no model"
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert find_local(HubName("some/body")) is None
    (place / "model-1.safetensors").write_bytes(b"x")
    (place / "x-Q8_0.gguf").write_bytes(b"x")
    assert find_local(HubName("some/body")) == place
    assert find_local(HubName("some/body", "Q8_0")) == place / "x-Q8_0.gguf"
    assert find_local(HubName("some/body", "Q4_0")) is None
    with pytest.raises(ConfigError, match="other programs share"):
        remove("some/body")
    assert place.is_dir()
