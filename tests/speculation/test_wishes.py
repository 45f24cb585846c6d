"""Whatever is asked for as speculation is granted, or refused with an error that says what to change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import SamplingParams
from paceline.errors import ModelNotFoundError, NotYetError, PacelineError, RequestError
from paceline.models.load.resolve import resolve
from paceline.speculation.datastore import Header
from paceline.speculation.drafter import DraftContext
from paceline.speculation.options import Options, check_nesting, shown
from paceline.speculation.spec import Speculation, build, parse

WRONG: dict[str, tuple[Speculation, type[PacelineError], str]] = {
    "k 0": (Speculation("ngram", k=0), RequestError, "k must be"),
    "k below 0": (Speculation("ngram", k=-4), RequestError, "k must be"),
    "k text": (Speculation("ngram", k="x"), RequestError, "k must be"),  # type: ignore[arg-type]
    "k flag": (Speculation("ngram", k=True), RequestError, "k must be"),
    "nodes 0": (Speculation("ngram", nodes=0), RequestError, "nodes must be"),
    "nodes below k": (Speculation("ngram", k=9, nodes=8), RequestError, "nodes must be"),
    "method": (Speculation("ngran"), RequestError, "Did you mean 'ngram'"),
    "method number": (Speculation(7), RequestError, "a method's name"),  # type: ignore[arg-type]
    "planned": (Speculation("retrieval-kv"), NotYetError, "not in this version"),
    "verify": (Speculation("ngram", verify="guess"), RequestError, "verification rule"),
    "verify list": (Speculation("ngram", verify=["x"]), RequestError, "verification rule"),  # type: ignore[arg-type]
    "adaptive": (Speculation("ngram", adaptive="yes"), RequestError, "adaptive"),  # type: ignore[arg-type]
    "options": (Speculation("ngram", options=[1]), RequestError, "dict"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_speculation_object_is_read_like_a_dict(name: str) -> None:
    wish, error, reason = WRONG[name]
    with pytest.raises(error, match=reason):
        parse(wish)
    with pytest.raises(error, match=reason):
        tiny_engine(speculation=wish)


def test_a_valid_speculation_object_comes_back_as_it_was() -> None:
    wish = Speculation("ngram", k=3, verify="rejection", options={"max_n": 4}, nodes=7, adaptive=False)
    assert parse(wish) == wish and parse(parse("suffix")) == parse("suffix")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    out = tiny_llm(speculation=wish).generate([[1, 2, 3] * 5], params)[0]
    assert out.speculation.method == "ngram" and out.speculation.verify == "rejection"


def nested(method: str, levels: int) -> Any:
    wish: Any = "ngram"
    for _ in range(levels):
        wish = {"method": method, "drafters": [wish]}
    return wish


def holding_itself(method: str) -> dict[str, Any]:
    wish: dict[str, Any] = {"method": method, "drafters": ["ngram"]}
    wish["drafters"].append(wish)
    return wish


@pytest.mark.parametrize("method", ["auto", "merge", "specinfer"])
@pytest.mark.parametrize("make", [lambda method: nested(method, 4), lambda method: nested(method, 300),
                                  lambda method: nested(method, 5000), holding_itself])
def test_drafters_inside_drafters_end_somewhere(method: str, make: Any) -> None:
    llm = tiny_llm()
    with pytest.raises(RequestError, match="3 levels"):
        llm.generate([[1, 2]], speculation=make(method))
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), speculation=nested(method, 3))


@pytest.mark.parametrize("wish", [
    {"method": "ngram", "verify": ["x"]}, {"method": "ngram", "verify": {}}, {"method": "ngram", "verify": None},
    {"method": "ngram", "max_n": nested("auto", 5000)}, {"method": nested("auto", 5000)}, nested("", 5000),
    {"method": "ngram", "max_n": 10 ** 5000}, {"method": "ngram", 1: 2, "x": 3}, {"method": "ngram", None: 2, 1: 3},
    {"method": "merge", "drafters": [{"method": "ngram", "max_n": 10 ** 5000}]},
    {"method": "merge", "drafters": [{"method": "ngram", 1: 2, "x": 3}]}, {"method": "x" * 10_000},
    {"method": "rest", "datastore": "a\0b"}, {"method": "rest", "datastore": "\ud800"},
    {"method": "rest", "datastore": "x" * 5000}, {"method": "auto", "drafters": [None]},
    {"method": "auto", "drafters": [Speculation("auto")]}, {"method": "auto", "drafters": ["ngram"] * 9},
], ids=lambda wish: shown(wish)[:60].encode("ascii", "replace").decode())
def test_whatever_is_asked_for_is_refused_with_an_error_of_ours(wish: Mapping[Any, Any]) -> None:
    engine = tiny_engine()
    with pytest.raises(PacelineError) as refusal:
        engine.add([1, 2, 3], SamplingParams(max_tokens=2), speculation=wish)
    assert len(str(refusal.value)) < 1500
    assert not engine.has_work


def test_unknown_options_of_mixed_types_are_named() -> None:
    with pytest.raises(RequestError, match="option 1 for 'ngram'"):
        Options("ngram", {"x": 1, 1: 2, None: 3}).finish()
    with pytest.raises(RequestError, match="names of options are texts"):
        check_nesting({"method": "auto", "drafters": [{"method": "ngram", 5: 1}]})


def test_a_datastore_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.store"
    path.write_bytes(Header(50, 0, 0, "").pack())
    wish = parse({"method": "rest", "datastore": str(path)})
    assert wish is not None
    with pytest.raises(RequestError, match="holds no text"):
        build(wish, DraftContext(50))


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 2500, "~nobody-of-this-name/model", "a\0b", "\ud800"])
def test_a_model_that_can_be_no_file_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no model") as refusal:
        resolve(name)
    assert len(str(refusal.value)) < 600


def test_a_value_is_shown_whatever_it_is() -> None:
    assert shown("x") == "'x'" and shown([1, 2]) == "[1, 2]"
    assert len(shown("x" * 5000)) < 250 and shown(10 ** 5000) == "an object of type int"
