"""Cached blocks belong to the adapter they were computed with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.adapter_files import ATTENTION, factors, shapes_of, tiny_model, write_adapter
from engine.tiny import tiny_llm
from paceline import LLM, SamplingParams
from paceline.engine.replay import replay_on

MODEL = tiny_model()
PROMPT = [(i * 17 + 5) % 97 for i in range(50)]


def llm_with(tmp_path: Path, **options: Any) -> LLM:
    made = tiny_llm(MODEL, **options)
    shapes = shapes_of(MODEL, ATTENTION)
    for name in ("one", "two"):
        made.load_adapter(name, str(write_adapter(tmp_path / name, factors(shapes, name), target_modules=ATTENTION)))
    made.load_adapter("one again", str(tmp_path / "one"))
    return made


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return llm_with(tmp_path)


def cached(llm: LLM, adapter: str | None, salt: str = "") -> int:
    params = SamplingParams(max_tokens=2, temperature=0.0, cache_salt=salt)
    return int(llm.generate([PROMPT], params, adapter=adapter)[0].metrics.cached_tokens)


def test_blocks_are_never_shared_across_adapters(llm: LLM) -> None:
    assert [cached(llm, name) for name in (None, "one", "two")] == [0, 0, 0]
    assert [cached(llm, name) for name in (None, "one", "two")] == [48, 48, 48]


def test_an_adapter_of_the_same_contents_shares(llm: LLM) -> None:
    assert (cached(llm, "one"), cached(llm, "one again")) == (0, 48)


def test_salts_hold_within_an_adapter(llm: LLM) -> None:
    assert [cached(llm, "one", salt) for salt in ("", "mine", "yours")] == [0, 0, 0]
    assert [cached(llm, "one", salt) for salt in ("", "mine", "yours")] == [48, 48, 48]


def test_no_salt_opens_an_adapters_blocks(llm: LLM) -> None:
    """Salts are what callers choose: even the name under which the cache keeps an adapter's blocks leads nowhere."""
    cached(llm, "one")
    roots = list(llm.engine.cache.prefix._roots)
    assert len(roots) == 1
    assert [cached(llm, None, salt) for salt in (roots[0], roots[0].strip(), f"salt {roots[0]}")] == [0, 0, 0]


def test_blocks_on_the_host_belong_to_their_adapter_too(tmp_path: Path) -> None:
    llm = llm_with(tmp_path, kv_blocks=10, max_model_len=80, host_cache=0.01)
    cached(llm, "one")
    llm.generate([[token] * 60 for token in range(4)], SamplingParams(max_tokens=2, temperature=0.0))
    assert (cached(llm, None), cached(llm, "two"), cached(llm, "one")) == (0, 0, 48)


def test_a_trace_names_the_adapter_and_is_replayed_with_it(llm: LLM) -> None:
    out = llm.generate([PROMPT], SamplingParams(max_tokens=8, seed=3, trace=True), adapter="one")[0]
    assert out.trace.adapter.startswith("one@sha256:")
    report = replay_on(llm.engine, out.trace)
    assert report.equal and report.same_model
    out.trace.adapter = out.trace.adapter.replace("one@", "two@")
    report = replay_on(llm.engine, out.trace)
    assert not report.equal and not report.same_model
