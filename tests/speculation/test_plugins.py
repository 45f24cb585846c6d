"""Drafters of other packages: by a registered name, or by their place; and what happens where they break."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import SamplingParams
from paceline.cli.options import speculation as from_command_line
from paceline.errors import ConfigError, RequestError
from paceline.serve.limits import ClientLimits
from paceline.speculation import plugins
from paceline.speculation.spec import parse

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 4
CODE = '''
from paceline.speculation.drafters.ngram import NgramDrafter

class Failing(NgramDrafter):
    def propose(self, sequences, budgets):
        raise ArithmeticError("of the drafter's own")

def build(method, options, context):
    options.integer("width", 2, 1, 8)
    return NgramDrafter(method)

def failing(method, options, context):
    return Failing()

def unbuilt(method, options, context):
    raise ArithmeticError("of the builder's own")

nothing = 3
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installed, as far as Python can tell."""
    (tmp_path / "their_drafters.py").write_text(CODE)
    (tmp_path / "their_script.py").write_text("raise SystemExit('usage: their_script FILE')")
    info = tmp_path / "their_drafters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-drafters\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.drafters]\ntheirs = their_drafters:build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.registered.cache_clear()
    yield
    plugins.registered.cache_clear()
    sys.modules.pop("their_drafters", None)


def text(wish: Any) -> Any:
    return tiny_llm().generate([PROMPT], GREEDY, speculation=wish)[0]


@pytest.mark.parametrize("wish", [
    "theirs", {"method": "theirs", "width": 3, "adaptive": False}, "their_drafters:build",
    {"method": "their_drafters:build", "k": 3}, {"method": "merge", "drafters": ["theirs", "their_drafters:build"]},
    from_command_line("their_drafters:build")])
def test_a_drafter_of_another_package_drafts(wish: Any) -> None:
    out, plain = text(wish), text(None)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    assert out.speculation.failure is None and not out.speculation.dropped


def test_its_options_are_checked_as_everybodys() -> None:
    with pytest.raises(RequestError, match="width"):
        text({"method": "theirs", "width": 99})
    with pytest.raises(RequestError, match="Unknown speculation option 'depth'"):
        text({"method": "theirs", "depth": 2})


def test_names_that_lead_nowhere_are_explained() -> None:
    with pytest.raises(RequestError, match="Did you mean 'theirs'"):
        parse("their")
    for place, said in (("no_such_module:build", "No module"), ("their_drafters:none", "no attribute"),
                        ("their_drafters:nothing", "no builder"), ("their_script:build", "SystemExit: usage")):
        with pytest.raises(RequestError, match=said):
            text(place)
        with pytest.raises(RequestError, match=said):  # an engine that is to draft with it does not even start
            tiny_engine(speculation=place)


def test_reading_a_wish_imports_nothing() -> None:
    assert parse("their_drafters:build") is not None and parse("theirs") is not None
    assert "their_drafters" not in sys.modules


def test_clients_of_a_server_cannot_run_its_code() -> None:
    limits = ClientLimits()
    for wish in ("their_drafters:build", {"method": "their_drafters:build"}, "theirs",
                 {"method": "merge", "drafters": ["ngram", "their_drafters:build"]},
                 {"method": "merge", "drafters": [{"method": "their_drafters:build"}]}):
        with pytest.raises(RequestError, match="--allow-speculation"):
            limits.speculation(wish, None)
    assert "their_drafters" not in sys.modules
    assert limits.speculation("their_drafters:build", parse("their_drafters:build")) is not None
    for name in ("theirs", "their_drafters:build"):
        assert ClientLimits(allow_speculation=("default", name)).speculation(name, None) is not None
    with pytest.raises(ConfigError, match="allow_speculation"):
        ClientLimits(allow_speculation=("nobodys",))


@pytest.mark.parametrize(("name", "said"), [("failing", "of the drafter's own"), ("unbuilt", "of the builder's own")])
def test_one_that_breaks_costs_drafts_and_its_traceback_is_in_the_log(
        name: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm()
    plain = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    with caplog.at_level(logging.WARNING, "paceline"):
        outs = llm.generate([PROMPT] * 3, GREEDY, speculation={"method": f"their_drafters:{name}", "adaptive": False})
    assert [out.outputs[0].token_ids for out in outs] == [plain] * 3
    assert all(said in out.speculation.failure for out in outs)
    assert llm.metrics()["drafter_failures"] == 3
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == 1, "one traceback is enough"
    assert said in str(told[0].exc_info[1]) and told[0].exc_info[2] is not None
