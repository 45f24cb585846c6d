"""What the first request of a kind would make everybody wait for is made before there are requests."""

from __future__ import annotations

import pytest

from grammar.structured import structured_llm
from paceline import SamplingParams
from paceline.grammar import compiler


def test_the_vocabulary_is_read_before_the_first_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    library = compiler.Library
    monkeypatch.setattr(compiler, "Library", lambda vocabulary: read.append(vocabulary) or library(vocabulary))
    llm = structured_llm()
    llm.engine.warm_up()
    assert len(read) == 1
    assert llm.generate("a", SamplingParams(regex="(yes|no)", max_tokens=8))[0].outputs[0].text in ("yes", "no")
    assert len(read) == 1


def test_without_the_library_only_who_needs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(vocabulary: object) -> None:
        raise ImportError("llguidance")

    monkeypatch.setattr(compiler, "Library", missing)
    llm = structured_llm()
    llm.engine.warm_up()
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].error is None
