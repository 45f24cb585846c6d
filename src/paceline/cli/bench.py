"""`paceline bench ...`: the benchmarks of paceline.bench, which also run bare as `python -m paceline.bench.latency`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.cli import bench_serve, options
from paceline.cli.naming import both_ways
from paceline.cli.pulling import pulls
from paceline.cli.terminal import loading_bars
from paceline.errors import ConfigError

app = typer.Typer(
    help="Measure Paceline beside its peers, in one run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(both_ways(bench_serve.serve))
app.command("compare")(bench_serve.compare)

Repeats = Annotated[int, typer.Option(min=1, help="Runs of each case; the best counts.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Measure transformers beside it, where installed.")]
Chart = Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw the figures: .png or .svg (needs "
                                                                    "matplotlib).")]
Dataset = Annotated[str | None, typer.Option(help="Questions: one JSON object per line: question_id, category, turns. "
                                                  "Default: a few of each kind that come with Paceline.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens to generate for each request.")]


@app.command("latency")
@pulls
def latency(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    repeats: Repeats = 3,
    new_tokens: NewTokens = 128,
    peers: Peers = True,
    chart: Chart = None,
    kernels: options.KernelChoice = "auto",
) -> None:
    """Single stream: decode and prefill tokens a second."""
    _check_chart(chart)
    _fetch(model)
    from paceline.bench.latency import run

    _emit(run(model, repeats, new_tokens, peers, kernels), json_file, chart)


@app.command("throughput")
@pulls
def throughput(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    repeats: Repeats = 2,
    new_tokens: NewTokens = 64,
    peers: Peers = True,
    chart: Chart = None,
    kernels: options.KernelChoice = "auto",
) -> None:
    """Many at once: output tokens a second with 1, 8 and 32 requests."""
    counts = _counts(concurrency, "--concurrency")
    _check_chart(chart)
    _fetch(model)
    from paceline.bench.throughput import run

    _emit(run(model, counts, new_tokens, repeats=repeats, peers=peers, kernels=kernels), json_file, chart)


@app.command("overhead")
def overhead(
    json_file: options.JsonFile = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in each case.")] = 200,
) -> None:
    """Host work of a step, on a model that costs nothing."""
    from paceline.bench.overhead import run

    _emit(run(steps=steps), json_file)


@app.command("swap")
@pulls
def swap(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    device: options.Device = "auto",
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of a prompt.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, each way once; the median counts.")] = 5,
) -> None:
    """Preempted requests and forgotten prefixes: copied back from host memory, or computed again."""
    _fetch(model)
    from paceline.bench.swap import run

    _emit(run(model, device, tokens, rounds), json_file)


@app.command("load")
@pulls
def load(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    repeats: Repeats = 5,
) -> None:
    """Time and peak memory until a model can generate, in fresh processes."""
    from paceline.bench.load import run

    _fetch(model)
    _emit(run(model, repeats), json_file)


@app.command("cpu")
@pulls
def cpu(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    cases: Annotated[str | None, typer.Option(help="Cases separated by commas; step means all steps. Default: all but "
                                                    "answers, which takes minutes.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Beside llama.cpp and onnxruntime, where installed.")] = False,
    repeats: Repeats = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine. Default: torch's.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Type of Paceline's cache.")] = "auto",
    text: Annotated[str | None, typer.Option(help="UTF-8 text, plain or .gz: everybody's agreement with float32 on "
                                                  "it, and ratios against those that are as good.")] = None,
    dataset: Dataset = None,
    per_category: Annotated[int | None, typer.Option(min=0, help="Questions of each category in answers; 0: all of "
                                                                 "them. Default: 2.")] = None,
) -> None:
    """The CPU path beside llama.cpp and onnxruntime: decode, prefill, batches, long context, cost of a step, and
    answers to real questions, speculation included."""
    from paceline.bench.cpu import choose, run
    from paceline.measure.text_files import read_text

    choose(cases, dataset, per_category)
    if text is not None:
        read_text(text)
    _fetch(model)
    _emit(run(model, cases, peers, repeats, threads, kv_dtype, text, dataset, per_category), json_file)


@app.command("gpu")
def gpu(
    json_file: options.JsonFile = None,
    shape: Annotated[str, typer.Option(help="llama-3.1-8b, smollm2-135m, qwen3-0.6b or another; a wrong name lists "
                                            "them.")] = "smollm2-135m",
    cases: Annotated[str, typer.Option(help="Separated by commas.")] =
    "tpot,ttft,mixed,verify,controls,breakdown,host,oracle,load",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--no-deterministic", help="Batch-invariant kernels.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs; the best counts.")] = 2,
    kv_dtype: Annotated[str, typer.Option(help="Type of the cache: auto or fp8.")] = "auto",
    batches: Annotated[str, typer.Option(help="Requests at once of tpot, separated by commas.")] = "1,8,32,128",
    requests: Annotated[int, typer.Option(min=1, help="Of the mixed case.")] = 512,
    peers: Annotated[str, typer.Option(metavar="BATCHES", help="Beside transformers, vLLM and SGLang where installed, "
                                                               "so many requests at once.")] = "",
) -> None:
    """The engine on a CUDA card, random weights in real shapes: time a token, first token, throughput, verifying."""
    from paceline.bench.gpu import run
    from paceline.bench.gpu_shapes import config_of
    from paceline.engine.build import choose_device, choose_dtype

    config_of(shape)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}.")
    counts, beside = _counts(batches, "--batches"), _counts(peers, "--peers") if peers else ()
    choose_dtype(dtype, choose_device("cuda"))
    _emit(run(shape, tuple(cases.split(",")), dtype, deterministic, counts, repeats, requests, kv_dtype, beside),
          json_file)


@app.command("serve-cost")
@pulls
def serve_cost(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once in the soak.")] = 64,
    seconds: Annotated[float, typer.Option(min=0, help="How long the soak lasts; 0: none.")] = 120.0,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once where the cost is measured.")] = 8,
    repeats: Annotated[int, typer.Option(min=0, help="Runs of the cost; the best counts; 0: none.")] = 3,
    new_tokens: NewTokens = 128,
    speculation: Annotated[str, typer.Option(help="A method's name, or none.")] = "none",
) -> None:
    """The server's cost against offline generate, and a soak with clients that hang up."""
    _fetch(model)
    from paceline.bench.serve_cost import run

    _emit(run(model, clients, seconds, streams, new_tokens, repeats, speculation), json_file)


@app.command("gaps")
@pulls
def gaps(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    speculation: Annotated[str, typer.Option(help="A method's name, or none.")] = "auto",
    only: Annotated[str, typer.Option(help="Of the dear things, those whose names have this in them.")] = "",
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for each of them.")] = 60.0,
    raised: Annotated[bool, typer.Option("--raised", help="With a server that allows 128 samples, 64 beams and drafts "
                                         "of 1,024 tokens.")] = False,
) -> None:
    """The server: how long one stream waits for its next token while others ask for dear things."""
    _fetch(model)
    from paceline.bench.gaps import run

    _emit(run(model, speculation, only, patience, raised), json_file)


@app.command("soak")
@pulls
def soak(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long there is traffic.")] = 20.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 12,
    seed: Annotated[int, typer.Option(help="Of what is asked, in which order, and who leaves when.")] = 0,
    speculation: Annotated[str, typer.Option(help="The server's own: a method's name, or none. Requests ask for "
                                                  "others.")] = "auto",
    lora: options.Lora = None,
) -> None:
    """The server under mixed traffic, with clients that leave: answers as offline, no errors, nothing left behind."""
    _fetch(model)
    from paceline.bench.soak import failed, run

    result = run(model, minutes, clients, seed, speculation, options.adapters(lora))
    _emit(result, json_file)
    if failed(result):
        raise typer.Exit(1)


@app.command("grammar")
@pulls
def grammar(
    json_file: options.JsonFile = None,
    model: options.Model = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest text, in tokens.")] = 1000,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time xgrammar beside it, where installed.")] = True,
) -> None:
    """Structured output: schemas whose texts parse and validate, and the time of compiling and of a mask."""
    _fetch(model)
    from paceline.bench.grammar import run

    _emit(run(model, max_tokens, peers), json_file)


@app.command("quality")
@pulls
def quality(
    text: Annotated[str, typer.Option(help="UTF-8 text to score, plain or .gz.")],
    json_file: options.JsonFile = None,
    model: options.Model = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many of its first tokens.")] = 20000,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are scored together.")] = 1024,
    gate_windows: Annotated[
        int, typer.Option(min=0, help="Windows for the formats that are tried in torch; 0: none.")
    ] = 6,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for the formats that are tried in torch.")] = "cpu",
) -> None:
    """What each number format loses against float32 on a text: perplexity, best tokens, probabilities (KL)."""
    from paceline.bench.quality import run
    from paceline.engine.build import choose_device
    from paceline.measure.text_files import read_text

    read_text(text)
    choose_device(device)
    _fetch(model)
    _emit(run(text, model, tokens, window, gate_windows, device=device), json_file)


@app.command("spec")
@pulls
def spec(
    dataset: Dataset = None,
    json_file: options.JsonFile = None,
    model: options.Model = None,
    methods: Annotated[str, typer.Option(help="all, names separated by commas, or JSON objects.")] = "all",
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="METHOD.KEY=VALUE", help="A method's option; repeatable.")
    ] = None,
    per_category: Annotated[int, typer.Option(min=0, help="Questions of each category; 0: all of them.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions in all, at most.")] = None,
    categories: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Stop where tokens differ from plain decoding.")] = False,
    chart: Chart = None,
    kernels: options.KernelChoice = "auto",
) -> None:
    """Speculation by Spec-Bench's protocol: every method beside plain decoding, speed-up and accepted tokens."""
    from paceline.bench.questions import OWN_QUESTIONS, choose, read_questions
    from paceline.bench.spec import Difference, contenders, finish, run

    dataset = dataset or str(OWN_QUESTIONS)
    choose(read_questions(dataset), per_category or None, limit, categories)
    contenders(methods, option or ())
    _check_chart(chart)
    _fetch(model)
    try:
        result = run(dataset, model, methods, option or (), per_category or None, limit, categories, max_tokens,
                     temperature, check=check, kernels=kernels)
    except Difference as difference:
        typer.echo(f"error: {difference}", err=True)
        raise typer.Exit(1) from None
    try:
        finish(result, json_file, chart)
    except OSError as error:
        raise ConfigError(f"Cannot write {json_file}: {error.strerror}; choose another file.") from None


@app.command("acceptance")
@pulls
def acceptance(
    dataset: Dataset = None,
    json_file: options.JsonFile = None,
    model: options.Model = None,
    methods: Annotated[str, typer.Option(help="heads (all that are loaded), names separated by commas, or JSON "
                                              "objects.")] = "heads",
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="METHOD.KEY=VALUE", help="A method's option; repeatable.")
    ] = None,
    head: Annotated[list[str] | None, typer.Option("--head", help="Folder or name of a trained head; repeatable. "
                                                                  "Default, on a CPU: those that come along.")] = None,
    depths: Annotated[str, typer.Option(help="Tokens of a chain, separated by commas.")] = "3,5,7",
    nodes: Annotated[int, typer.Option(min=0, help="Tokens of a tree; 0: no trees.")] = 60,
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0,1",
    context: Annotated[str, typer.Option(help="Tokens of a prompt, separated by commas: the question behind a text; "
                                              "0: the questions as they are.")] = "0",
    text: Annotated[str | None, typer.Option(help="What they are asked behind: UTF-8, plain or .gz.")] = None,
    per_category: Annotated[int, typer.Option(min=0, help="Questions of each category; 0: all of them.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions in all, at most.")] = None,
    categories: Annotated[str | None, typer.Option(help="Only these, separated by commas.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    at_once: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 32,
    device: options.Device = "auto",
    kernels: options.KernelChoice = "auto",
) -> None:
    """Tokens that drafts have accepted, by category and by position: greedy and sampled, chains and trees, untimed."""
    from paceline.bench.acceptance import LOADED, check, finish, run
    from paceline.bench.questions import OWN_QUESTIONS, choose, read_questions
    from paceline.bench.spec import contenders
    from paceline.engine.build import choose_device

    chains, heats = _counts(depths, "--depths"), _temperatures(temperatures)
    contexts = _counts(context, "--context", least=0)
    check(contexts, text)
    dataset = dataset or str(OWN_QUESTIONS)
    choose(read_questions(dataset), per_category or None, limit, categories)
    if methods != LOADED:
        contenders(methods, option or ())
    choose_device(device)
    _fetch(model)
    result = run(dataset, model, methods, option or (), head or (), chains, nodes, heats, contexts, text,
                 per_category or None, limit, categories, max_tokens, at_once, device, kernels)
    try:
        finish(result, json_file)
    except OSError as error:
        raise ConfigError(f"Cannot write {json_file}: {error.strerror}; choose another file.") from None


@app.command("crowd")
@pulls
def crowd(
    dataset: Dataset = None,
    json_file: options.JsonFile = None,
    model: options.Model = None,
    methods: Annotated[str, typer.Option(help="Names separated by commas, or JSON objects.")] = "ngram,auto",
    at_once: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0",
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Of each method; the median counts.")] = 3,
    longest: Annotated[int, typer.Option(min=1, help="Characters of a prompt, at most.")] = 6000,
    device: options.Device = "auto",
    deterministic: options.Deterministic = None,
    check: Annotated[bool, typer.Option("--check", help="Fail where a text differs from plain decoding.")] = False,
) -> None:
    """Speculation with many requests at once, prompts that come once: beside plain decoding, and are texts the same."""
    from paceline.bench.crowd import run
    from paceline.bench.questions import OWN_QUESTIONS, read_questions
    from paceline.bench.spec import contenders
    from paceline.engine.build import choose_device

    counts, heats = _counts(at_once, "--at-once"), _temperatures(temperatures)
    dataset = dataset or str(OWN_QUESTIONS)
    read_questions(dataset)
    contenders(methods)
    choose_device(device)
    _fetch(model)
    result = run(dataset, model, methods, counts, heats, max_tokens, rounds, longest, device, deterministic)
    _emit(result, json_file)
    if check and result["differences"]:
        typer.echo(f"error: {result['differences']} texts differ from plain decoding.", err=True)
        raise typer.Exit(1)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0.0 <= one <= 100.0 for one in found):
        raise ConfigError(f"--temperatures must be numbers from 0 separated by commas, got {text!r}.")
    return found


def _counts(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) >= least for part in parts):
        raise ConfigError(f"{option} must be whole numbers from {least} separated by commas, got {text!r}.")
    return tuple(int(part) for part in parts)


def _fetch(model: str | None) -> None:
    """Have the model's files here before the clock runs, with a progress bar."""
    from paceline.models.load.resolve import resolve

    with loading_bars() as progress:
        resolve(model, progress=progress)


def _check_chart(chart: str | None) -> None:
    if chart is not None:
        from paceline.bench.picture import ready

        ready(chart)


def _emit(result: dict[str, Any], json_file: str | None, chart: str | None = None) -> None:
    from paceline.bench.report import emit

    try:
        emit(result, json_file)
    except OSError as error:
        raise ConfigError(f"Cannot write {json_file}: {error.strerror}; choose another file.") from None
    if chart is not None:
        from paceline.bench.picture import draw_rows

        draw_rows(result, chart)
