"""`paceline bench serve` and `paceline bench compare`: load tests of any server, and two results beside each other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.pulling import Pull, fetch_missing
from paceline.cli.terminal import loading_bars
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.serving.load_test import LoadTest


def _load(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Load", **more)


def _data(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Requests", **more)


def _result(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Result", **more)


def serve(
    url: Annotated[str | None, typer.Option(help="Of a server that is there, with OpenAI's API, anybody's. Default: "
                                                 "`paceline serve` is started for it.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True,
                                                help="For that server, or both.")] = None,
    beside: Annotated[str | None, typer.Option(metavar="URL", help="A second server of the same model: both get the "
                                               "same requests in turn.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="With --beside: how often each level runs on both, each time "
                                              "with --requests prompts that come once. Who is first changes, so an "
                                              "even number is better. Default: 6.")] = None,
    rest: Annotated[float | None, typer.Option(min=0.0, metavar="SECONDS", help="With --beside: how long both are left "
                                               "alone before each one's part, since who has answered may have work "
                                               "left. Default: 2.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="With --url the server's name for it, by default "
                                              "the first it has; else what to serve, as everywhere.")] = None,
    pull: Pull = False,
    in_process: Annotated[bool, typer.Option("--in-process", help="No server: the engine in this process, asked by the "
                                             "load generator itself.")] = False,
    engine_options: Annotated[str | None, typer.Option(metavar="JSON", help="With --in-process: options of the engine, "
                                                       'such as {"max_num_seqs": 64}.')] = None,
    speculation: Annotated[str, typer.Option(help="Of the server or engine that is started: a method's name, none, "
                                                  "or JSON.")] = "auto",
    serve_options: Annotated[str, typer.Option(metavar="WORDS", help="Further options of `paceline serve`, in one "
                                               "text.")] = "",
    arrivals: Annotated[str | None, _load("closed (a client asks again when it is answered), poisson, constant, burst "
                                          "or trace. Default: what the options below mean.")] = None,
    rate: Annotated[str | None, _load("Requests a second, whoever still waits; several separated by commas: a "
                                      "sweep.")] = None,
    concurrency: Annotated[str | None, _load("Clients of a closed loop; several separated by commas: a sweep. "
                                             "Default: 8.")] = None,
    burst: Annotated[int, _load("Requests of a burst. Without --rate all come at once.", min=1)] = 8,
    trace: Annotated[str | None, _load("File of arrivals: seconds, one a line, or JSON objects with timestamp, "
                                       "input_length, output_length.", metavar="FILE")] = None,
    time_scale: Annotated[float, _load("What a trace's times are multiplied with; 0.001 where they are milliseconds.",
                                       min=0.0)] = 1.0,
    requests: Annotated[int, _load("Of each level and run.", min=1)] = 100,
    repeats: Annotated[int, _load("Runs of each level: intervals know then how much runs differ.", min=1)] = 1,
    warmup: Annotated[int, _load("Requests that come before and do not count.", min=0)] = 4,
    timeout: Annotated[float, _load("Seconds after which a client gives up on a request.", min=0.001)] = 600.0,
    seed: Annotated[int, _load("Of arrivals and of what is asked.")] = 0,
    dataset: Annotated[str, _data("synthetic, shared-prefix, or a file with a JSON object a line: prompt, messages, or "
                                  "turns as in Spec-Bench.")] = "synthetic",
    input_len: Annotated[str, _data("Words of a made-up prompt, about a token each: a number, or a range such as "
                                    "64-512.")] = "256",
    output_len: Annotated[str, _data("Longest answer, in tokens: a number or a range.")] = "128",
    prefixes: Annotated[int, _data("Beginnings that shared-prefix prompts share.", min=1)] = 4,
    prefix_len: Annotated[int, _data("Words of such a beginning.", min=1)] = 512,
    endpoint: Annotated[str, _data("chat, completions, or auto: chat where the dataset has messages.")] = "auto",
    temperature: Annotated[float, _data("0 is greedy.", min=0.0)] = 0.0,
    ignore_eos: Annotated[bool, _data("Answers as long as asked. Not OpenAI's: Paceline, vLLM and SGLang know "
                                      "it.", "--ignore-eos")] = False,
    usage: Annotated[bool, _data("Ask the server to count tokens (stream_options); without, events with text are "
                                 "counted.", "--usage/--no-usage")] = True,
    extra_body: Annotated[str | None, _data("Further fields of every request.", metavar="JSON")] = None,
    slo: Annotated[str | None, _result("Goodput: requests a second that keep to these, in seconds, such as "
                                       "ttft=0.5,tpot=0.05,e2e=10.")] = None,
    percentiles: Annotated[str, _result("Separated by commas.")] = "50,90,99",
    json_file: options.JsonFile = None,
    html: Annotated[str | None, _result("Write a report with charts, in one file.", metavar="FILE.html")] = None,
    chart: Annotated[str | None, _result("Draw latencies and rates of each level: .png or .svg (needs matplotlib).",
                                         metavar="FILE.png")] = None,
) -> None:
    """A load test of a server with OpenAI's API: TTFT, TPOT, ITL, E2E, rates and goodput, with intervals."""
    from paceline.bench.serving.arrivals import levels, read_trace
    from paceline.bench.serving.beside import REST, TURNS, pair_of
    from paceline.bench.serving.datasets import Asks, Lengths
    from paceline.bench.serving.figures import parse_percentiles, parse_slo
    from paceline.bench.serving.load_test import LoadTest
    from paceline.bench.serving.target import Target

    for name, number in (("--time-scale", time_scale), ("--timeout", timeout), ("--temperature", temperature)):
        if not isfinite(number):
            raise ConfigError(f"{name} is a number, got {number!r}.")
    test = LoadTest(
        levels(arrivals, _numbers(rate, "--rate", float), _numbers(concurrency, "--concurrency", int),
               trace is not None),
        Asks(dataset, Lengths.parse(input_len, "--input-len"), Lengths.parse(output_len, "--output-len"), prefixes,
             prefix_len, seed),
        requests, repeats, warmup, endpoint, temperature, usage, timeout, burst, seed,
        read_trace(trace, time_scale) if trace is not None else (), parse_slo(slo), parse_percentiles(percentiles),
        {**({"ignore_eos": True} if ignore_eos else {}), **_fields(extra_body, "--extra-body", '{"top_p": 0.9}')})
    for target in (json_file, html):
        if target not in (None, "-") and not Path(str(target)).absolute().parent.is_dir():
            raise ConfigError(f"Cannot write {target}: its folder does not exist; choose another file.")
    if chart is not None:
        from paceline.bench.picture import ready

        ready(chart)
    asked: dict[str, Any] = {
        "url": url, "model": model, "levels": [level.name for level in test.levels], "trace": trace, "burst": burst,
        "time_scale": time_scale, "requests": requests, "repeats": repeats, "warmup": warmup, "timeout": timeout,
        "seed": seed, "dataset": dataset, "input_len": input_len, "output_len": output_len, "prefixes": prefixes,
        "prefix_len": prefix_len, "endpoint": test.path, "temperature": temperature, "usage": usage,
        "extra": test.extra, "slo": test.slo}
    for name, value in (("--turns", turns), ("--rest", rest)):
        if value is not None and beside is None:
            raise ConfigError(f"{name} is for two servers: give the second one with --beside.")
    if rest is not None and not isfinite(rest):
        raise ConfigError(f"--rest is a number of seconds, got {rest!r}.")
    if beside is not None and url is None:
        raise ConfigError("--beside is a second server: give the first one with --url.")
    if beside is not None and repeats != 1:
        raise ConfigError("--repeats is for one server: say with --turns how often each level runs on both.")
    if beside is not None and chart is not None:
        raise ConfigError("--chart draws one server: leave it out with --beside; --html has charts of both.")
    if engine_options is not None and not in_process:
        raise ConfigError("--engine-options is for --in-process: use --serve-options for a server that is started "
                          "here.")
    if url is not None:
        if in_process:
            raise ConfigError("--url and --in-process are two places: leave one of them out.")
        if speculation != "auto" or serve_options:
            raise ConfigError("--speculation and --serve-options are for a server that is started here: leave them "
                              "out with --url, and start that server as you want it.")
        if beside is not None:
            _measure_both(pair_of(url, beside, api_key, model), test, turns or TURNS, REST if rest is None else rest,
                          asked | {"beside": beside}, json_file, html)
            return
        _measure(Target.parse(url, api_key).served(model), test, asked, json_file, html, chart)
        return
    if in_process and serve_options:
        raise ConfigError("--serve-options is for a server: use --engine-options with --in-process.")
    from paceline.models.load.resolve import resolve

    if pull:
        fetch_missing(model)
    with loading_bars() as progress:
        resolve(model, progress=progress)
    if in_process:
        _measure_here(model, speculation, _fields(engine_options, "--engine-options", '{"max_num_seqs": 64}'), test,
                      asked, json_file, html, chart)
        return
    from paceline.bench.serving.own_server import server

    with server(model, speculation, _words(serve_options)) as (host, port, _):
        own = {"speculation": speculation, "serve_options": serve_options}
        _measure(Target.parse(f"http://{host}:{port}").served("bench"), test, asked | own, json_file, html, chart)


def _measure_here(model: str | None, speculation: str, engine_options: dict[str, Any], test: LoadTest,
                  asked: dict[str, Any], json_file: str | None, html: str | None, chart: str | None) -> None:
    from paceline.async_llm import AsyncLLM
    from paceline.bench.serving.in_process import InProcess

    wish = options.speculation(speculation)
    with loading_bars() as progress:
        llm = AsyncLLM(model, progress=progress, warm_up=True, **{"speculation": wish, **engine_options})
    try:
        own = {"in_process": True, "speculation": speculation, "engine_options": engine_options}
        _measure(InProcess(llm, "bench"), test, asked | own, json_file, html, chart)
    finally:
        llm.close()


def _measure(target: Any, test: LoadTest, asked: dict[str, Any], json_file: str | None, html: str | None,
             chart: str | None) -> None:
    from paceline.bench.report import say
    from paceline.bench.serving import html_report, tables
    from paceline.bench.serving.load_test import run

    result = run(target, test, asked)
    _report(result, tables.plain, html_report.page, json_file, html)
    if chart is not None:
        from paceline.bench.serving.picture import draw

        draw(result, chart)
        say(f"serve: {chart} is written")


def _measure_both(targets: Any, test: LoadTest, turns: int, rest: float, asked: dict[str, Any], json_file: str | None,
                  html: str | None) -> None:
    from paceline.bench.serving import beside_report
    from paceline.bench.serving.beside import run

    _report(run(targets, test, turns, rest, asked), beside_report.plain, beside_report.page, json_file, html)


def _report(result: dict[str, Any], table: Callable[[dict[str, Any]], str], page: Callable[[dict[str, Any]], str],
            json_file: str | None, html: str | None) -> None:
    from paceline.bench.report import say

    _write(json.dumps(result, indent=1), table(result), json_file)
    if html is not None:
        _save(html, page(result))
        say(f"serve: {html} is written")


def compare(
    before: Annotated[str, typer.Argument(metavar="A.json", help="What a benchmark wrote with --json; several runs "
                                                                 "separated by commas.")],
    after: Annotated[str, typer.Argument(metavar="B.json", help="The same of what it is compared with.")],
    json_file: options.JsonFile = None,
    check: Annotated[bool, typer.Option("--check", help="Fail where a figure is worse beyond noise.")] = False,
) -> None:
    """Two results of the same benchmark: ratios with intervals, and which differences are beyond noise."""
    from paceline.bench.compare import run, table

    result = run(before, after)
    _write(json.dumps(result, indent=1), table(result), json_file)
    worse = [row["case"] for row in result["rows"] if row["verdict"] == "worse"]
    if check and worse:
        typer.echo(f"error: worse beyond noise: {', '.join(worse)}", err=True)
        raise typer.Exit(1)


def _write(document: str, table: str, json_file: str | None) -> None:
    print(document if json_file == "-" else table)
    if json_file not in (None, "-"):
        _save(str(json_file), document + "\n")


def _save(target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {target}: {error.strerror}; choose another file.") from None


def _numbers(text: str | None, option: str, kind: type) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        found = [0]
    if not all(one > 0 for one in found):
        raise ConfigError(f"{option} must be numbers above 0, separated by commas, got {text!r}.")
    return found


def _fields(text: str | None, option: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} must be a JSON object such as {example}, got {text!r}.")
    return found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--serve-options {text!r} cannot be split into words ({error}).") from None
