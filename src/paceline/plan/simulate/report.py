"""Simulated fleets for people and for programs: a table, one JSON object, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config import EngineConfig
from paceline.plan.charts import Chart, Line
from paceline.plan.planner import Plan
from paceline.plan.simulate.figures import SHARES, Figures, Targets, advice, best
from paceline.plan.simulate.load_test import Beside


@dataclass(frozen=True)
class Report:
    plan: Plan
    config: EngineConfig
    source: str
    targets: Targets
    fleets: list[Figures]
    costs: str
    """Whose the steps' costs are, in words."""
    beside: list[Beside] = field(default_factory=list)
    """Of the best fleet and a real one."""

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.plan.shape.name, "hardware": self.plan.hardware.label, "costs": self.costs,
                "traffic": self.source, "targets": asdict(self.targets),
                "engine": {name: getattr(self.config, name) for name in (
                    "max_model_len", "block_size", "kv_blocks", "max_batch_tokens", "max_num_seqs", "max_step_ms",
                    "max_queue")},
                "fleets": [asdict(one) for one in self.fleets], "best": best(self.fleets).fleet,
                "advice": advice(self.fleets, self.targets),
                "compared": [asdict(one) | {"error": one.error} for one in self.beside]}

    def text(self) -> str:
        first = self.fleets[0]
        head = (f"{self.plan.shape.name} on {self.plan.hardware.label}, {self.costs}: {first.requests:,} requests of "
                f"{self.source}, simulated\neach replica: {self.config.kv_blocks:,} blocks of "
                f"{self.config.block_size} tokens, {self.config.max_num_seqs} sequences and "
                f"{self.config.max_batch_tokens} rows at once")
        parts = [head, _aligned([_HEAD, *map(self._line, self.fleets)]), advice(self.fleets, self.targets)]
        if self.beside:
            rows = [[one.what, one.unit, f"{one.measured:.4g}", f"{one.simulated:.4g}",
                     "-" if one.error is None else f"{one.error:+.1%}"]
                    for one in self.beside]
            parts.append(_aligned([[f"{best(self.fleets).fleet}:", "unit", "measured", "simulated", "error"], *rows]))
        return "\n\n".join(parts)

    def _line(self, one: Figures) -> list[str]:
        return [one.fleet, f"{one.request_rate:.2f}", f"{one.output_rate:,.0f}",
                "-" if one.goodput is None else f"{one.goodput:.2f}",
                "-" if one.slo_share is None else f"{one.slo_share:.1%}",
                *("/".join(f"{1e3 * values[share]:.{digits}f}" for share in SHARES if share in values) or "-"
                  for values, digits in ((one.ttft, 0), (one.tpot, 1), (one.e2e, 0))),
                f"{one.hit_rate:.1%}", f"{one.preemptions}", f"{one.refused}", f"{one.utilisation:.0%}",
                f"{one.front:.2f}",
                "-" if one.dollars is None else f"{one.dollars:,.2f}",
                "-" if one.dollars_per_million is None else f"{one.dollars_per_million:.2f}"]

    def charts(self) -> list[Chart]:
        kinds = list(dict.fromkeys((one.routing, one.disaggregated) for one in self.fleets))

        def lines(value: str) -> list[Line]:
            found = []
            for kind in kinds:
                points = [(float(one.replicas), _value(one, value)) for one in self.fleets
                          if (one.routing, one.disaggregated) == kind]
                found.append(Line(kind[0] + (", apart" if kind[1] else ""), sorted(points), len(points) == 1))
            return found

        return [Chart("Time to first token, p99", "replicas", "ms", lines("ttft")),
                Chart("Prompt tokens found in the cache", "replicas", "%", lines("hits")),
                Chart("Requests a second" + (" within targets" if self.targets else ""), "replicas", "req/s",
                      lines("goodput"))]


_HEAD = ["replicas", "req/s", "tok/s", "goodput", "in SLO", "TTFT p50/90/99 ms", "TPOT p50/90/99 ms",
         "E2E p50/90/99 ms", "hits", "preempted", "refused", "at work", "front cores", "$", "$/M tokens"]


def _value(one: Figures, what: str) -> float:
    if what == "ttft":
        return 1e3 * one.ttft[SHARES[-1]]
    return 100 * one.hit_rate if what == "hits" else one.request_rate if one.goodput is None else one.goodput


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) if column else cell.ljust(width)
                               for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines)
