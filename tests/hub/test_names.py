"""One way to name a model, for every command; and a catalogue of what this version runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hub.stand_in import StandIn
from paceline import LLM
from paceline.cli.main import app, main
from paceline.errors import ModelNotFoundError
from paceline.hub.catalogue import CATALOGUE, SUGGESTED, smaller_relatives, suggestion
from paceline.hub.listing import quant_of
from paceline.hub.names import HubName, hub_name, short_name
from paceline.hub.pull import pull
from paceline.models.load import resolve
from paceline.models.registry import ARCHITECTURES
from paceline.plan.known import KNOWN, find_shape


@pytest.mark.parametrize(("name", "repo", "quant"), [
    ("qwen3-0.6b", "unsloth/Qwen3-0.6B-GGUF", "Q4_K_M"), ("Qwen3-0.6B:q8_0", "unsloth/Qwen3-0.6B-GGUF", "Q8_0"),
    ("owner/name", "owner/name", None), ("owner/name.v2:iq4_nl", "owner/name.v2", "IQ4_NL")])
def test_names_that_stand_for_a_repository(name: str, repo: str, quant: str | None) -> None:
    assert hub_name(name) == HubName(repo, quant)


@pytest.mark.parametrize("name", ["", "nothing", "a/b/c", "/a/b", "../a", "a/..", "a/b:", "a/b:c/d", "a/x.gguf",
                                  "a b/c", "aé/b", "a/b\n", "x" * 5000, "a/" + "b" * 500])
def test_names_that_stand_for_none(name: str) -> None:
    assert hub_name(name) is None


def test_what_the_catalogue_names_is_called_so() -> None:
    for name, entry in CATALOGUE.items():
        found = hub_name(name)
        assert found == HubName(entry.repo, entry.quant) and short_name(found) == name
        assert short_name(HubName(entry.repo, "Q8_0")) == f"{name}:Q8_0"


def test_the_catalogue_has_only_what_runs_and_what_can_be_planned() -> None:
    for name in CATALOGUE:
        assert KNOWN[name]["model_type"] in ARCHITECTURES, name
        assert find_shape(name).name == name
        # 4 bits and a half of a weight, the embedding aside: a size that is far off is another model's.
        assert 0.45 < CATALOGUE[name].bytes / find_shape(name).parameters < 1.1, name


def test_the_document_has_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for entry in CATALOGUE.values():
        assert f"| `{entry.name}` | `{entry.repo}:{entry.quant}` | {entry.bytes / 1e9:.1f} GB |" in page


def test_relatives_are_smaller_and_spell_alike() -> None:
    assert smaller_relatives("smollm2-1.7b") == ["smollm2-135m", "smollm2-360m"]
    assert smaller_relatives("qwen3-0.6b") == [] and smaller_relatives("nothing") == []
    for name in CATALOGUE:
        for other in set(smaller_relatives(name)) & set(CATALOGUE):
            assert KNOWN[other]["model_type"] == KNOWN[name]["model_type"]


def test_a_suggestion_is_small_beside_the_free_memory() -> None:
    assert suggestion(1 << 40) == CATALOGUE[SUGGESTED[0]] and suggestion(1 << 20) is None
    small = suggestion(2 * 10**9)
    assert small is not None and 4 * small.bytes <= 2 * 10**9


@pytest.mark.parametrize(("name", "quant"), [
    ("Model-Q4_K_M.gguf", "Q4_K_M"), ("model.q8_0.gguf", "Q8_0"), ("model-bf16.gguf", "BF16"), ("a/F16.gguf", "GGUF"),
    ("model-IQ4_XS.gguf", "IQ4_XS"), ("m-Q6_K-00001-of-00002.gguf", "Q6_K"), ("qwen2-model.gguf", "GGUF")])
def test_quantisations_are_told_by_the_ends_of_names(name: str, quant: str) -> None:
    assert quant_of(name) == quant


# -- one resolver -----------------------------------------------------------------------------------------------------

def test_what_was_pulled_is_found_by_each_of_its_names(hub: StandIn) -> None:
    path = pull("owner/name")
    assert resolve("owner/name") == resolve("owner/name:Q4_K_M") == resolve("owner/name:q4_k_m") == path
    with pytest.raises(ModelNotFoundError, match=r"paceline pull owner/name:Q8_0.*--pull"):
        resolve("owner/name:Q8_0")
    assert len(hub.count("hub")) == 3, "looking for it asks nobody"


def test_a_short_name_is_its_repository(hub: StandIn) -> None:
    hub.repo = CATALOGUE["qwen3-0.6b"].repo
    with pytest.raises(ModelNotFoundError, match=r"`paceline pull qwen3-0\.6b` fetches it"):
        resolve("qwen3-0.6b")
    path = pull("qwen3-0.6b")
    assert resolve("Qwen3-0.6B") == resolve(f"{hub.repo}:Q4_K_M") == path


def test_paths_come_first(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("owner/name")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "qwen3-0.6b").mkdir()
    assert resolve("owner/name") == Path("owner/name") and resolve("qwen3-0.6b") == Path("qwen3-0.6b")


def test_python_is_told_the_same(hub: StandIn) -> None:
    with pytest.raises(ModelNotFoundError, match="paceline pull owner/name"):
        LLM("owner/name")
    assert not hub.asked


def commands() -> Iterator[tuple[str, list[Any]]]:
    """Those that take a model, with their parameters."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}".strip())
        if any(one.name == "model" for one in command.params):
            yield path, command.params

    return walk(typer.main.get_command(app), "")


def test_every_command_with_a_model_can_pull_it() -> None:
    assert [path for path, own in commands() if not any(one.name == "pull" for one in own)] == []


ARGUMENTS_OF_THEIR_OWN = {"generate", "replay", "train datastore"}


def test_every_command_names_its_model_both_ways() -> None:
    found = {path: ([one.name for one in own if one.param_type_name == "argument"],
                    [flag for one in own if one.param_type_name == "option" for flag in one.opts])
             for path, own in commands()}
    assert {"chat", "show", "verify", "quantize", "plan", "serve", "bench latency", "bench serve"} <= found.keys()
    for path, (arguments, flags) in found.items():
        assert "--model" in flags and "-m" in flags, path
        assert (arguments == ["model"]) is (path not in ARGUMENTS_OF_THEIR_OWN), path


@pytest.mark.parametrize("way", [["owner/none"], ["--model", "owner/none"], ["-m", "owner/none"]])
@pytest.mark.parametrize("command", ["chat", "show", "verify", "quantize", "plan", "bench latency"])
def test_whichever_way_a_model_is_named_it_is_looked_for(command: str, way: list[str], hub: StandIn,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), *way]) == 2
    assert "owner/none" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "show", "plan", "bench latency", "serve"])
def test_a_model_that_is_named_both_ways_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "one", "--model", "other"]) == 2
    assert "named twice, 'one' and --model 'other'" in capsys.readouterr().err
