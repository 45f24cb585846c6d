"""The dashboard asks for nothing that the server does not export, and leaves nothing out by accident."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_engine
from paceline import SamplingParams
from paceline.measure.process_memory import ProcessMemory
from paceline.serve.metrics import ServerMetrics, engine_state
from paceline.watch.watch import DriftWatch

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "paceline.json"
LEFT_OUT = {
    "vllm:gpu_cache_usage_perc": "the older name of vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "the older name of vllm:inter_token_latency_seconds",
}
"""Exported, and on purpose on no panel."""
WORDS = {"sum", "rate", "increase", "histogram_quantile", "group_left"}
TERM = re.compile(r"by \((?P<by>[^)]*)\)|ignoring\([^)]*\)|\[[^]]*\]|(?P<name>[a-zA-Z_][\w:]*)(?P<chosen>\{[^}]*\})?")
LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+")


def expressions() -> Iterator[str]:
    document = json.loads(DASHBOARD.read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def asked(expression: str) -> dict[str, set[str]]:
    """The metrics that PromQL names, and for each the labels by which it is chosen or summed up."""
    if expression.startswith("label_values"):
        name, label = re.findall(r"[\w:]+", expression)[1:]
        return {name: {label}}
    found: dict[str, set[str]] = {}
    summed: set[str] = set()
    """By these labels, whatever metric comes next."""
    for term in TERM.finditer(expression):
        if term["by"] is not None:
            summed = {label.strip() for label in term["by"].split(",")}
        elif term["name"] and term["name"] not in WORDS:
            chosen = re.sub(r'"[^"]*"', "", term["chosen"] or "")
            found.setdefault(term["name"], set()).update(summed, re.findall(r"(\w+)\s*[=!]", chosen))
            summed = set()
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every series by its name, with its labels, of a server that has served a request and refused another."""
    engine, metrics = tiny_engine(), ServerMetrics("tiny")
    watch = DriftWatch(engine, 1.0, seed=1)
    name = engine.add([1, 2, 3], SamplingParams(max_tokens=6), speculation={"method": "wrong", "tokens": [1, 2, 3, 4]})
    record = engine.record(name)
    while record.open:
        engine.step()
    metrics.ended(record)
    metrics.responded(200)
    metrics.responded(429)
    found: dict[str, set[str]] = {}
    state, memory = engine_state(engine, watch), ProcessMemory(1, 2, 3, 4, 5, 6, 7)
    state["watch"] |= {"shadows": {"equal": 1}, "tokens": {"ngram": 8}, "acceptance": {"ngram": 0.5},
                       "evidence": [{"method": "ngram", "law": "emitted", "nats": 0.1}],
                       "raised": [{"kind": "text", "method": "ngram", "count": 1}],
                       "changed": [{"direction": "fell", "method": "ngram", "count": 1}]}
    for line in metrics.exposition(state, memory).decode().splitlines():
        match = LINE.fullmatch(line)
        if match is not None and not line.startswith("#") and not match[1].endswith("_created"):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


def family(series: str, exported: dict[str, set[str]]) -> str:
    """A histogram is one metric: its buckets, its sum and its count."""
    for end in ("_bucket", "_sum", "_count"):
        if series.endswith(end) and series.removesuffix(end) + "_bucket" in exported:
            return series.removesuffix(end)
    return series


def test_the_dashboard_asks_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = asked(expression)
        assert names, expression
        for name, labels in names.items():
            assert name in exported, f"{name} is not exported: {expression}"
            assert labels <= exported[name], f"{name} has no label {labels - exported[name]}: {expression}"


def test_every_metric_is_on_a_panel_or_left_out_on_purpose(exported: dict[str, set[str]]) -> None:
    shown = {family(name, exported) for expression in expressions() for name in asked(expression)}
    missing = {family(name, exported) for name in exported} - shown - set(LEFT_OUT)
    assert not missing, f"give them a panel in {DASHBOARD.name}, or a reason in LEFT_OUT: {sorted(missing)}"
    assert set(LEFT_OUT) <= {family(name, exported) for name in exported} and not set(LEFT_OUT) & shown


def test_a_mistake_would_be_found(exported: dict[str, set[str]]) -> None:
    right = 'sum by (status) (rate(paceline_http_responses_total{model_name=~"$model", status=~"429|503"}[5m]))'
    assert asked(right) == {"paceline_http_responses_total": {"model_name", "status"}}
    wrong = asked("sum(rate(paceline_rows_total[5m])) / sum by (stage) (rate(paceline_steps_total[5m]))")
    assert wrong == {"paceline_rows_total": set(), "paceline_steps_total": {"stage"}}
    assert not wrong["paceline_steps_total"] <= exported["paceline_steps_total"]


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(x, y) for panel in panels for place in (panel["gridPos"],)
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24
