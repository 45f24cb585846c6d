"""`paceline plan`: what a model needs, how fast it would be and which options pay, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from paceline.cli import options
from paceline.cli import plan_simulate as simulation
from paceline.cli.plain import plain
from paceline.cli.terminal import load_llm
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.plan.drafters import Drafter
    from paceline.plan.measured import Calibration
    from paceline.plan.shape import ModelShape
    from paceline.plan.simulate.traffic import Tokenize

Value = TypeVar("Value", int, float)
_HARDWARE = ("A known card or CPU, xN behind it for several that share the model (h100x8), or a .json file with "
             "memory_gb, bandwidth_gb_s and tflops. Default: h100.")
_DRAFTER = ("A method (ngram, suffix, eagle3, dspark, ...), a trained head's folder, name or hub id, or draft:MODEL; "
            "repeatable. Default: ngram and eagle3, with --prompts what is at hand; none: no speculation.")

_LEAST_SEATS, _SEATS = 64, 256
"""Sequences at once that engines take by themselves, on a CPU and on a card; to time more they are asked for."""


def plan(
    model: Annotated[str | None, typer.Argument(
        help="Folder or config.json, .gguf file, known name (llama-2-13b) or hub id; no weights are needed. "
             f"Default: {options.DEFAULT_MODEL}.")] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help=_HARDWARE)] = None,
    context: Annotated[int, typer.Option(help="Tokens of a text, prompt and output together.")] = 4096,
    batch: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,8,64",
    drafter: Annotated[list[str] | None, typer.Option(help=_DRAFTER)] = None,
    acceptance: Annotated[str | None, typer.Option(
        help="Shares of drafted tokens that are accepted, separated by commas. Default: what is typical of each "
             "drafter.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Draft so many tokens. Default: the best number.")] = None,
    dtype: Annotated[str | None, typer.Option(
        help="Of the weights: float32, bfloat16, float16, fp8, int8, int4, mxfp4, nvfp4. Default: as stored.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(
        "--kv-dtype", help="Of the cache: float32, bfloat16, float16, fp8, int8, int4 or int2. Default: as the model "
                           "computes.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Of a prompt. Default: 3/4 of the context.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Of an output. Default: 1/4 of the context.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second to serve: how many cards that takes.")] = None,
    ttft_ms: Annotated[float | None, typer.Option("--ttft", help="Longest time to a first token, in ms.")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot", help="Longest time between tokens, in ms.")] = None,
    price: Annotated[float | None, typer.Option(help="Dollars an hour of one card. Default: a rough one.")] = None,
    chart: Annotated[Path | None, typer.Option(
        help="Draw roofline, speed-up over K and time per token: .html, .svg or .png (needs matplotlib).")] = None,
    measured: Annotated[bool, typer.Option(
        "--measured", help="Time steps of the model on this machine, plan with what that says of it, and show "
                           "prediction beside measurement.")] = False,
    threads: Annotated[int | None, typer.Option(
        min=1, help="Of the engine that is loaded to measure, and with --cores of every replica. Default: one a core, "
                    "and where nothing is measured one.")] = None,
    prompts: Annotated[Path | None, typer.Option(
        help="Measure acceptance on these prompts, with the drafters at hand: .jsonl with \"prompt\" or \"messages\", "
             "or paragraphs of text.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer to one of them.")] = 128,
    head: options.Head = None,
    simulate: simulation.Simulate = None,
    replicas: simulation.Replicas = "1",
    routing: simulation.Routing = None,
    prefill_replicas: simulation.Prefill = 0,
    decode_replicas: simulation.Decode = 0,
    transfer_gb_s: simulation.Transfer = 12.5,
    cores: simulation.Cores = None,
    memory_gb_s: simulation.Memory = None,
    front_request_ms: simulation.FrontRequest = simulation.FRONT_REQUEST_MS,
    front_token_ms: simulation.FrontToken = simulation.FRONT_TOKEN_MS,
    time_scale: simulation.TimeScale = 1.0,
    compare: simulation.Compare = None,
    max_num_seqs: simulation.Seqs = None,
    max_batch_tokens: simulation.Rows = None,
    max_step_ms: simulation.StepMs = simulation.MAX_STEP_MS,
    max_queue: simulation.Queue = simulation.MAX_QUEUE,
    kv_blocks: simulation.Blocks = None,
    as_json: options.Json = False,
) -> None:
    """Say what a model takes and how fast it would be: memory, times, speculation, cards, cost, what to switch on. With
    --simulate: what fleets of it make of your traffic."""
    from paceline.plan import charts, report
    from paceline.plan.known import find_shape
    from paceline.plan.planner import Workload
    from paceline.plan.planner import plan as make

    if chart is not None:
        charts.ready(chart)
    fleets = None
    if simulate is not None:
        fleets = simulation.Simulation(
            source=simulate, replicas=_numbers(replicas, "--replicas", int), routing=routing, prefill=prefill_replicas,
            decode=decode_replicas, transfer_gb_s=transfer_gb_s, cores=cores, threads=threads, memory_gb_s=memory_gb_s,
            front_request_ms=front_request_ms, front_token_ms=front_token_ms, time_scale=time_scale, compare=compare,
            max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_step_ms=max_step_ms, max_queue=max_queue,
            kv_blocks=kv_blocks)
        fleets.layouts()  # what cannot be is said before anything is measured
        drafter = drafter or ["none"]
    elif routing or prefill_replicas or decode_replicas or cores or memory_gb_s or compare or replicas != "1":
        raise ConfigError("--replicas, --routing, --prefill-replicas, --decode-replicas, --cores, --memory-gb-s and "
                          "--compare are for --simulate TRAFFIC: name a trace, or leave them out.")
    work = Workload(context=context, batches=tuple(_numbers(batch, "--batch", int)), prompt=prompt_tokens,
                    output=output_tokens, rate=rate, ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
                    tpot_s=None if tpot_ms is None else tpot_ms / 1e3)
    if hardware is not None and measured:
        raise ConfigError("--measured plans for this machine: leave --hardware out, or --measured.")
    if acceptance is not None and prompts is not None:
        raise ConfigError("--prompts measures what --acceptance says: leave one of them out.")
    levels = None if acceptance is None else _numbers(acceptance, "--acceptance", float)
    wanted = _Wanted(find_shape(model or options.DEFAULT_MODEL), hardware or "h100", _drafters(drafter))
    if measured or prompts is not None:
        wanted = _with_engine(model, head, drafter, measured, prompts, max_tokens, work.batches, dtype, kv_dtype,
                              prompts_too=simulate is not None, threads=threads)
        wanted = wanted if measured else wanted._replace(hardware=hardware or "h100")
    found = make(wanted.shape, wanted.hardware, workload=work, dtype=dtype, kv_dtype=kv_dtype,
                 drafters=wanted.drafters, k=k, price=price, acceptance=levels)
    if fleets is not None:
        told = fleets.run(found, price, k, getattr(wanted.hardware, "cost", None), wanted.tokenize,
                          lambda text: typer.echo(text, err=True))
        if chart is not None:
            charts.draw(told.charts(), chart, f"{found.shape.name} on {found.hardware.label}", told.text())
        typer.echo(json.dumps(plain(told.as_dict()), indent=2) if as_json else told.text())
        return
    if chart is not None:
        charts.draw(charts.charts(found), chart, f"{found.shape.name} on {found.hardware.label}", report.text(found))
    typer.echo(json.dumps(plain(report.as_dict(found)), indent=2) if as_json else report.text(found))


class _Wanted(NamedTuple):
    shape: ModelShape
    hardware: str | Calibration
    drafters: Sequence[str | Drafter]
    tokenize: Tokenize | None = None
    """By the model's own tokenizer, where the model is loaded."""


def _with_engine(model: str | None, head: list[str] | None, drafter: list[str] | None, measured: bool,
                 prompts: Path | None, max_tokens: int, batches: Sequence[int], dtype: str | None, kv_dtype: str | None,
                 prompts_too: bool = False, threads: int | None = None) -> _Wanted:
    """What takes the model itself: the shape of its files, this machine, and its answers."""
    from paceline.models.load.resolve import resolve
    from paceline.plan import prompts as asked
    from paceline.plan.known import find_shape
    from paceline.plan.measured import measure, time_prompts
    from paceline.plan.planner import usual_cache

    texts = None if prompts is None else asked.read(prompts)
    seats = max(_SEATS, *batches) if measured and max(batches) > _LEAST_SEATS else None
    llm = load_llm(model, enable_prefix_caching=False, heads=options.heads(head), threads=threads, max_num_seqs=seats)
    shape = find_shape(str(resolve(model)))
    names = asked.at_hand(llm) if texts is not None and drafter is None else list(_drafters(drafter))
    known = {name: asked.drafter_at_hand(llm, name, shape) for name in names}
    drafters = list(known.values())
    if texts is not None:
        drafters = [replace(known[one.drafter], acceptance=one.acceptance, source=one.source)
                    for one in asked.acceptance(llm, names, texts, max_tokens)]
    machine: str | Calibration = "h100"
    if measured:
        if prompts_too:
            time_prompts(llm)
        machine = measure(llm, shape, dtype or shape.dtype, kv_dtype or usual_cache(shape, dtype), batches)
    tokenizer = llm.engine.tokenizer
    return _Wanted(shape, machine, drafters, None if tokenizer is None else tokenizer.encode)


def _drafters(given: list[str] | None) -> tuple[str, ...]:
    if given is None:
        return ("ngram", "eagle3")
    if "none" in given and len(given) > 1:
        raise ConfigError("--drafter none leaves no other: name some, or write none alone.")
    return () if given == ["none"] else tuple(dict.fromkeys(given))


def _numbers(text: str, option: str, kind: Callable[[str], Value]) -> list[Value]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{option} must be numbers separated by commas, got {text!r}.") from None
