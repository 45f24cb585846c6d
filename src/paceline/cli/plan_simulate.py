"""`paceline plan --simulate`: traffic through fleets of replicas, before there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.plan.planner import Plan
    from paceline.plan.simulate.fleet import Layout
    from paceline.plan.simulate.host import Host
    from paceline.plan.simulate.report import Report
    from paceline.plan.simulate.traffic import Asked, Tokenize
    from paceline.speculation.step_cost import StepCost


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Simulation", **more)


Simulate = Annotated[str | None, _option(
    "Send traffic through a fleet: a file with a JSON object a line (at, prompt_tokens, output_tokens, prefix, "
    "prefix_tokens, session, ...), what `bench serve --json` wrote, or poisson:rate=50,seconds=3600,prompt=512,"
    "output=128,prefixes=20.", "--simulate", metavar="TRAFFIC")]
Replicas = Annotated[str, _option("Fleets of so many replicas, separated by commas.", "--replicas")]
Routing = Annotated[str | None, _option("prefix, round-robin or random. Default: each of them.", "--routing")]
Prefill = Annotated[int, _option("A fleet with so many replicas that compute prompts alone, too.",
                                 "--prefill-replicas", min=0)]
Decode = Annotated[int, _option("And so many that go on with them.", "--decode-replicas", min=0)]
Transfer = Annotated[float, _option("GB a second between those.", "--transfer-gb-s", min=1e-6)]
Cores = Annotated[int | None, _option("All replicas (--threads each) and their front share a machine with so many.",
                                      "--cores", min=1)]
Memory = Annotated[float | None, _option("GB a second that the memory of that machine gives to all of them. Default: "
                                         "no limit; with --measured what is measured.", "--memory-gb-s", min=1e-6)]
FrontRequest = Annotated[float, _option("Milliseconds of a core that a request takes beside its steps.",
                                        "--front-request-ms", min=0.0)]
FrontToken = Annotated[float, _option("And each token that is streamed.", "--front-token-ms", min=0.0)]
TimeScale = Annotated[float, _option("What a trace's times are multiplied with.", "--time-scale", min=0.0)]
Compare = Annotated[str | None, _option("Set the best fleet beside a load test: what `bench serve --json` wrote.",
                                        "--compare", metavar="FILE")]
Seqs = Annotated[int | None, _option("Sequences of a replica at once. Default: as `serve`.", "--max-num-seqs", min=1)]
Rows = Annotated[int | None, _option("Rows of a step. Default: as `serve`.", "--max-batch-tokens", min=1)]
StepMs = Annotated[float, _option("About so long a step may take while somebody decodes. Default: as `serve`.",
                                  "--max-step-ms", min=1e-3)]
Queue = Annotated[int, _option("Requests that wait for a replica at most; further ones are refused. Default: as "
                               "`serve`.", "--max-queue", min=1)]
Blocks = Annotated[int | None, _option("Cache blocks of a replica. Default: what its memory holds.", "--kv-blocks",
                                       min=1)]


FRONT_REQUEST_MS, FRONT_TOKEN_MS = 31.0, 0.93
"""Measured with four replicas on one machine (docs/cluster.md)."""
MAX_STEP_MS, MAX_QUEUE = 100.0, 256
"""As `serve`."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What was asked for."""

    source: str
    replicas: Sequence[int]
    routing: str | None
    prefill: int
    decode: int
    transfer_gb_s: float
    cores: int | None
    threads: int | None
    memory_gb_s: float | None
    front_request_ms: float
    front_token_ms: float
    time_scale: float
    compare: str | None
    max_num_seqs: int | None
    max_batch_tokens: int | None
    max_step_ms: float
    max_queue: int
    kv_blocks: int | None

    def __post_init__(self) -> None:
        for name in ("transfer_gb_s", "memory_gb_s", "front_request_ms", "front_token_ms", "time_scale", "max_step_ms"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ConfigError(f"--{name.replace('_', '-')} must be a number, got {getattr(self, name)}.")
        if self.memory_gb_s is not None and self.cores is None:
            raise ConfigError("--memory-gb-s is of the machine that replicas share: give --cores, or leave it out.")

    def layouts(self) -> list[Layout]:
        from paceline.cluster.routing import POLICIES
        from paceline.plan.simulate.fleet import Layout

        names = list(POLICIES) if self.routing is None else [self.routing]
        if self.routing is not None and self.routing not in POLICIES:
            raise ConfigError(f"--routing must be one of {', '.join(POLICIES)}, got {self.routing!r}.")
        if not all(count >= 1 for count in self.replicas):
            raise ConfigError("--replicas must be numbers from 1 on, separated by commas.")
        apart = [Layout(prefill=self.prefill, decode=self.decode, routing=name) for name in names
                 if self.prefill or self.decode]
        return [*(Layout(replicas=count, routing=name) for count in self.replicas
                  for name in (names if count > 1 else names[:1])),  # one replica leaves no choice
                *(apart if max(self.prefill, self.decode) > 1 else apart[:1])]

    def run(self, plan: Plan, price: float | None, k: int | None, measured: StepCost | None = None,
            tokenize: Tokenize | None = None, say: Callable[[str], None] = lambda text: None) -> Report:
        from paceline.plan.simulate.costs import MeasuredCosts, PlannedCosts, speculation
        from paceline.plan.simulate.figures import Targets, best, figures
        from paceline.plan.simulate.fleet import Engine, simulate
        from paceline.plan.simulate.host import FrontCost
        from paceline.plan.simulate.load_test import asked_again, compare, is_load_test
        from paceline.plan.simulate.report import Report
        from paceline.plan.simulate.traffic import traffic, words

        work, layouts = plan.workload, self.layouts()
        if is_load_test(self.source):
            if self.time_scale != 1.0:
                raise ConfigError("--time-scale is for traces: a load test's times are as they were.")
            trace = asked_again(self.source, tokenize or words)
        else:
            trace = traffic(self.source, work.prompt_tokens, work.output_tokens, self.time_scale, tokenize or words)
        longest = max(one.prompt_tokens + one.output_tokens for one in trace)
        config = self._config(plan, trace, longest)
        drafts = speculation(plan, round(sum(one.prompt_tokens + one.output_tokens / 2 for one in trace) / len(trace)),
                             k)
        costs = PlannedCosts(plan.roofline) if measured is None else MeasuredCosts(measured, plan.roofline)
        front = FrontCost(1e-3 * self.front_request_ms, 1e-3 * self.front_token_ms)
        engine = Engine(config, costs, drafts, plan.shape.cache_bytes(longest, plan.kv_dtype) / longest,
                        self.transfer_gb_s * 1e9, self._host(plan, measured is not None), front)
        targets = Targets(work.ttft_s, work.tpot_s)
        paid = price if price is not None else plan.hardware.price
        found = []
        for layout in layouts:
            say(f"plan: {len(trace):,} requests through {layout.name}")
            found.append(figures(simulate(trace, engine, layout), targets, paid, plan.hardware.count))
        drafter = "no speculation" if drafts is None else f"{drafts.drafter.name} at {drafts.acceptance:.2f}"
        whose = f"{'planned' if measured is None else 'measured'} steps, {drafter}"
        real = self.compare or (self.source if is_load_test(self.source) else None)
        beside = [] if real is None else compare(real, best(found))
        return Report(plan, config, self.source, targets, found, whose, beside)

    def _host(self, plan: Plan, measured: bool) -> Host | None:
        """The machine that all share; None: each has its own. What one replica reads at most was measured alone; what
        several do is that many times as much."""
        from paceline.plan.measured import scaling
        from paceline.plan.simulate.host import Host

        if self.cores is None:
            return None
        threads = self.threads or (self.cores if measured else 1)
        given = None if self.memory_gb_s is None else 1e9 * self.memory_gb_s
        if given is None and measured and plan.hardware.kind == "cpu":
            given = plan.hardware.bandwidth * scaling(threads, self.cores)
        return Host(self.cores, threads, given)

    def _config(self, plan: Plan, trace: Sequence[Asked], longest: int) -> EngineConfig:
        """As the engine decides by itself, with the memory that the planner expects to be left."""
        from paceline.config import EngineOptions, Facts, resolve
        from paceline.plan.simulate.fleet import check

        hardware, shape = plan.hardware, plan.shape
        context = shape.context or max(longest, plan.workload.context)
        if plan.memory.left <= 0:
            raise ConfigError(plan.problems[0] if plan.problems else "The weights do not fit.")
        per_token = shape.cache_bytes(longest, plan.kv_dtype) / longest * hardware.count / shape.cache_cards(
            hardware.count)
        options = EngineOptions(kv_blocks=self.kv_blocks, max_num_seqs=self.max_num_seqs,
                                max_batch_tokens=self.max_batch_tokens, max_step_ms=self.max_step_ms,
                                max_queue=self.max_queue)
        facts = Facts(device="cpu" if hardware.kind == "cpu" else "cuda", context=context, cores=1,
                      bytes_per_token=max(1, round(per_token)), free_memory=int(plan.memory.left), total_memory=1)
        config = resolve(options, facts)
        check(trace, replace(config, max_model_len=context))
        return replace(config, max_model_len=min(config.max_model_len, longest))
