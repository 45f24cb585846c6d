"""Tenants: each is served as if the others' texts had never been there, by every cache and every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.tiny import VOCAB, tiny_engine, tiny_model
from engine.toy_heads import KeepingHead, shape_of
from paceline import SamplingParams
from paceline.engine.core import Engine
from paceline.engine.drafting.models import LoadedModel
from paceline.engine.observe.timeline import Event, Timelines
from paceline.request import Tenant
from paceline.speculation.datastore import write_datastore
from paceline.speculation.spec import BUILDERS, HEADS
from speculation.model_drafting import WeightsAgain

PROMPT = [(i * 17 + 5) % VOCAB for i in range(42)]
NEW = 16
MODEL = tiny_model()
OTHER = tiny_model("llama", num_hidden_layers=2)
HER, HIM = Tenant("her"), Tenant("him")
WISHES: dict[str, dict[str, Any]] = {
    "auto": {}, "ngram": {}, "suffix": {"factor": 3.0}, "lookahead": {}, "rest": {},
    "specinfer": {"drafters": ["suffix", "ngram"]}, "merge": {"drafters": ["suffix", "lookahead"]},
    "draft": {"model": "own"}, "skip": {"skip": [1]}, "exit": {"layers": 2}, "precision": {},
    "cascade": {"drafter": "suffix", "by": "skip"}, **{kind: {} for kind in HEADS},
    "prediction": {"tokens": [1, 2, 3]}, "oracle": {"tokens": [1, 2, 3]}, "wrong": {"tokens": [1, 2, 3]},
}
REMEMBERING = {"auto", "suffix", "specinfer", "merge"}
"""Those whose drafts show what was said before to the same tenant."""


def engine_of(method: str, **options: Any) -> Engine:
    heads = {method: KeepingHead(shape_of(method, MODEL))} if method in HEADS else None
    engine = tiny_engine(MODEL, trained=heads, **options)
    engine.draft_models.add("own", LoadedModel(OTHER, None, engine.kernels))
    engine.draft_models.source = WeightsAgain()
    return engine


def ask(engine: Engine, tenant: Tenant, wish: Any = None, prompt: list[int] | None = None, **params: Any) -> Any:
    """What came of a request, and every draft that it got."""
    timelines = Timelines()
    engine.observers.add(timelines)
    asked = SamplingParams(**{"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "seed": 3} | params)
    name = engine.add(PROMPT if prompt is None else prompt, asked, speculation=wish, tenant=tenant)
    while engine.has_work:
        engine.step()
    record = engine.take(name)
    assert record.error is None and (record.speculation is None or record.speculation.failure is None)
    return record.metrics, list(timelines.requests[tenant.name, name].events)


def seen(found: tuple[Any, list[Event]]) -> list[Any]:
    metrics, events = found
    return [metrics.cached_tokens, metrics.cache_miss,
            *((event.start, event.rows, list(event.tokens), event.draft) for event in events)]


def wished(method: str, tmp_path: Path) -> dict[str, Any]:
    wish = {"method": method, "k": 5, "adaptive": False} | WISHES[method]
    if method == "rest":
        write_datastore(tmp_path / "operators.store", [PROMPT], VOCAB)
        wish["datastore"] = str(tmp_path / "operators.store")
    return wish


def test_all_methods_are_here() -> None:
    assert set(WISHES) == set(BUILDERS)


@pytest.mark.parametrize("method", WISHES)
def test_a_tenant_is_drafted_for_as_if_alone(method: str, tmp_path: Path) -> None:
    wish = wished(method, tmp_path)
    engine, alone = engine_of(method), engine_of(method)
    for _ in range(2):
        ask(engine, HER, wish)
    foreign, own = seen(ask(engine, HIM, wish)), seen(ask(engine, HER, wish))
    assert foreign == seen(ask(alone, HIM, wish))
    assert own[0] > 0 == foreign[0], "blocks are her own to share"
    drafts = [[event[-1] for event in found[2:] if event[-1] is not None] for found in (own, foreign)]
    assert (drafts[0] != drafts[1]) or method not in REMEMBERING


@pytest.mark.parametrize("wish", [{"method": "ngram"}, {"method": "auto"}])
def test_a_device_drafts_for_a_tenant_as_if_alone(wish: dict[str, Any]) -> None:
    def chances(engine: Engine, tenant: Tenant) -> list[list[int]]:
        executor: Any = engine.executor
        levels: list[list[int]] = executor._chances.among([f"{len(tenant.name)} {tenant.name} "]).levels().tolist()
        return levels

    engine, fresh = (tiny_engine(MODEL, kernels="stepped", capture="lazy") for _ in range(2))
    looping = [7, 8, 9] * 8
    for _ in range(3):
        ask(engine, HER, wish, looping, max_tokens=60)
    assert chances(engine, HIM) == chances(fresh, HIM) != chances(engine, HER)


def test_swapped_out_beginnings_are_their_tenants() -> None:
    engine = tiny_engine(MODEL, kv_blocks=10, max_model_len=80, host_cache=0.01)
    ask(engine, HER, max_tokens=2)
    for token in range(4):
        ask(engine, Tenant("them"), prompt=[token] * 60, max_tokens=2)
    assert engine.cache.prefix.cold_node_of[0], "something has to lie on the host"
    assert ask(engine, HIM, max_tokens=2)[0].cached_tokens == 0
    assert ask(engine, HER, max_tokens=2)[0].cached_tokens == 40


def test_a_draft_models_own_cache_is_apart_too() -> None:
    engine = engine_of("draft")
    wish = {"method": "draft", "model": "own", "k": 3, "adaptive": False}
    model: Any = engine.draft_models.load("own")
    hits = []
    for tenant in (HER, HIM, HER, HIM):
        before = model._cache.hits
        ask(engine, tenant, wish, max_tokens=6)
        hits.append(model._cache.hits - before)
    assert hits[:2] == [0, 0] and hits[2] == hits[3] > 0


def test_salts_narrow_further_and_no_salt_opens_a_tenants_texts() -> None:
    engine = tiny_engine(MODEL)
    ask(engine, HER)
    (scope,) = engine.cache.prefix._roots
    salts = ["", scope, scope.strip(), "her", "her ", " her ", f"0  {scope}"]
    for tenant in (HIM, Tenant("her", shares_cache=True), Tenant("3 her"), Tenant("her "), Tenant("he")):
        for salt in salts:
            assert ask(engine, tenant, cache_salt=salt, max_tokens=1)[0].cached_tokens == 0
    assert [ask(engine, HER, cache_salt=salt, max_tokens=1)[0].cached_tokens for salt in ("mine", "mine", "")] == [
        0, 40, 40]


def test_those_who_share_share_with_each_other_alone_and_are_told_no_position() -> None:
    engine = tiny_engine(MODEL)
    ask(engine, HER, max_tokens=1)
    one, other = Tenant("one", shares_cache=True), Tenant("other", shares_cache=True)
    assert ask(engine, one, max_tokens=1)[0].cached_tokens == 0
    assert ask(engine, other, max_tokens=1)[0].cached_tokens == 40
    for prompt, alone in (([*PROMPT[:20], *[1] * 20], "diverged at token 20"),
                          ([*PROMPT[:3], *[1] * 20], "diverged at token 3"), ([2] * 20, "salt")):
        told = [ask(engine, tenant, prompt=prompt, max_tokens=1)[0].cache_miss for tenant in (HER, other)]
        assert told == [alone, "no cached prefix"]
    assert ask(engine, other, prompt=[1, 2], max_tokens=1)[0].cache_miss == "shorter than a block"


def test_what_a_controller_learns_of_texts_stays_with_their_tenant() -> None:
    engine = tiny_engine(MODEL)
    for _ in range(6):
        ask(engine, HER, {"method": "ngram", "k": 6, "adaptive": False}, [7, 8, 9] * 8, max_tokens=60)
    known: Any = engine._drafting.controller
    scopes = {tenant.name: f"3 {tenant.name} " for tenant in (HER, HIM)}
    hers, his = (known._methods.of("ngram", scope) for scope in scopes.values())
    assert hers.cycles > 0 == his.cycles and hers.by_score.rate(0.5) != his.by_score.rate(0.5) == 0.5
    assert hers.traits is his.traits
