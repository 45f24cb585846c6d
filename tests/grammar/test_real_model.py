"""The default model writes all schemas at temperature 1; what comes out parses, validates and is the same drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.grammar import generate, judge
from paceline.bench.schemas import OPEN_ENDED, SCHEMAS
from paceline.llm import LLM

pytestmark = pytest.mark.real_model


def check(path: Path, names: list[str]) -> None:
    llm = LLM(str(path), max_model_len=2048, threads=1)
    schemas = {name: SCHEMAS[name] for name in names}
    plain, drafted = (generate(llm, schemas, 1000, speculation) for speculation in (None, "auto"))
    whole = {name: out for name, out in zip(names, plain) if out.outputs[0].finish_reason == "stop"}
    assert {out.outputs[0].finish_reason for name, out in zip(names, plain) if name not in whole} <= {"length"}
    assert set(names) - set(whole) <= set(OPEN_ENDED)
    found = judge(list(whole.values()), {name: schemas[name] for name in whole})
    assert found.parsed == found.valid == len(whole)
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    origins = {origin.drafter for out in drafted for origin in out.speculation.provenance}
    assert "grammar" in origins


def test_some_schemas(default_model_path: Path) -> None:
    check(default_model_path, ["person", "unicode_keys", "enum_unicode"])


@pytest.mark.full
def test_all_schemas(default_model_path: Path) -> None:
    check(default_model_path, list(SCHEMAS))
