"""What the drift watch found, as Prometheus reads it and as the page shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Report = dict[str, Any]
"""DriftWatch.report()."""


def families(report: Report, model: tuple[str, str]) -> Iterator[Metric]:
    """`model`: the label that every metric has, and its value."""
    label, name = model

    def made(kind: Any, title: str, text: str, *labels: str) -> Any:
        return kind(f"paceline_watch_{title}", text, labels=(label, *labels))

    def one(kind: Any, title: str, text: str, value: float) -> Metric:
        family = made(kind, title, text)
        family.add_metric((name,), value)
        return family  # type: ignore[no-any-return]

    yield one(GaugeMetricFamily, "share", "Share of speculating requests that are watched.", report["share"])
    yield one(CounterMetricFamily, "requests", "Requests that were watched.", report["watched"])
    shadows = made(CounterMetricFamily, "shadows", "Shadows by what came of them.", "outcome")
    for outcome, count in report["shadows"].items():
        shadows.add_metric((name, outcome), count)
    yield shadows
    yield one(CounterMetricFamily, "shadow_tokens", "Tokens computed for shadows, which no other metric counts.",
              report["shadow_tokens"])
    judged = made(CounterMetricFamily, "tokens", "Tokens of watched requests that were judged.", "method")
    for method, count in report["tokens"].items():
        judged.add_metric((name, method), count)
    yield judged
    yield one(GaugeMetricFamily, "kl_nats", "Highest divergence of a verify step from a plain one.",
              report["kl"]["highest"])
    evidence = made(GaugeMetricFamily, "evidence_nats", "Evidence against a law; an alarm at 13.8.", "method", "law")
    for law in report["evidence"]:
        evidence.add_metric((name, law["method"], law["law"]), law["nats"])
    yield evidence
    usual = made(GaugeMetricFamily, "acceptance", "What acceptance is usual, by the first requests.", "method")
    for method, mean in report["acceptance"].items():
        usual.add_metric((name, method), mean)
    yield usual
    alarms = made(CounterMetricFamily, "alarms", "Alarms by kind.", "kind", "method")
    for alarm in report["raised"]:
        alarms.add_metric((name, alarm["kind"], alarm["method"]), alarm["count"])
    yield alarms
    changes = made(CounterMetricFamily, "acceptance_changes",
                   "Times that acceptance was told to have changed, which is no alarm: other traffic alone does it.",
                   "direction", "method")
    for change in report["changed"]:
        changes.add_metric((name, change["direction"], change["method"]), change["count"])
    yield changes


def shown(report: Report | None, clock: float) -> Report | None:
    """What the page shows to operators; None: nothing is watched."""
    if report is None:
        return None
    return {"share": report["share"], "watched": report["watched"], "shadows": report["shadows"],
            "tokens": sum(report["tokens"].values()), "kl": report["kl"]["highest"],
            "alarms": [{"kind": one["kind"], "method": one["method"], "evidence": one["evidence"],
                        "request": one["request"], "suspended": one["suspended"], "age_s": clock - one["at"]}
                       for one in reversed(report["alarms"])][:10],
            "changes": [{"method": one["method"], "direction": one["direction"], "before": one["before"],
                         "after": one["after"], "requests": one["requests"], "age_s": clock - one["at"]}
                        for one in reversed(report["changes"])][:3]}
