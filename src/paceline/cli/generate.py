"""`paceline generate`: complete one or more prompts as one batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.files import read_piped, write_whole
from paceline.cli.plain import plain
from paceline.cli.speed import speed
from paceline.cli.terminal import console, load_llm, print_error, printable
from paceline.errors import PacelineError, RequestError

if TYPE_CHECKING:
    from paceline import LLM
    from paceline.request import RequestOutput, SamplingParams


def generate(
    prompts: Annotated[list[str], typer.Argument(help="Prompts; several are one batch. '-' reads one from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message to a chat model.")] = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = 64,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    no_repeat_ngram_size: options.NoRepeatNgram = 0,
    bad_words: options.BadWords = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    parse_special: options.ParseSpecial = False,
    seed: options.Seed = None,
    n: options.Samples = 1,
    timeout: options.Timeout = None,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    as_json: options.Json = False,
    pretty: options.Pretty = False,
    trace: options.Trace = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    quantization: options.Quantization = None,
    deterministic: options.Deterministic = None,
    max_model_len: options.MaxModelLen = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    speculation: options.SpeculationText = None,
    head: options.Head = None,
) -> None:
    """Complete prompts. Several prompts run as one batch; one bad prompt fails alone."""
    from paceline.request import SamplingParams

    params = SamplingParams(
        n=n, max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, no_repeat_ngram_size=no_repeat_ngram_size,
        bad_words=tuple(bad_words or ()), stop=tuple(stop or ()), stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos, parse_special=parse_special, seed=seed, timeout_s=timeout, logprobs=logprobs,
        prompt_logprobs=prompt_logprobs, trace=trace is not None,
    )
    if system is not None and not chat:
        raise RequestError("--system needs --chat: a plain prompt has no system message.", "system")
    if trace is not None and len(prompts) != 1:
        raise RequestError("--trace records one prompt: give one, or run the command once for each.", "trace")
    if pretty and not as_json:
        raise RequestError("--pretty is for --json: give both, or neither.", "pretty")
    wish = options.speculation(speculation)
    texts = [read_piped(sys.stdin) if prompt == "-" else prompt for prompt in prompts]
    llm = load_llm(
        model, device=device, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization, deterministic=deterministic,
        max_model_len=max_model_len, speculation=wish, heads=options.heads(head),
        tensor_parallel_size=tensor_parallel_size,
    )
    jobs: list[Any] = [_messages(text, system) for text in texts] if chat else texts
    if n > 1 and temperature == 0:
        _note(f"the {n} samples of a prompt are the same text: temperature 0 leaves nothing to chance "
              "(--temperature 0.8 makes them differ)")
    began = time.perf_counter()
    if len(jobs) == 1 and n == 1 and not as_json and logprobs is None and sys.stdout.isatty():
        outs = [_stream(llm, jobs[0], params)]
        seconds = time.perf_counter() - began
    else:
        outs = llm.chat(jobs, params) if chat else llm.generate(jobs, params)
        seconds = time.perf_counter() - began
        if as_json:
            print(json.dumps(document(outs, texts, model), ensure_ascii=not _speaks_unicode(),
                             indent=2 if pretty else None))
        else:
            _show(outs, texts)
    if not as_json:  # which has all figures
        _note(speed(outs, seconds))
    if trace is not None:
        write_trace(outs[0], trace)
    failed = [out for out in outs if out.error is not None]
    for out in failed:
        print_error(out.error or PacelineError("failed"))
    if failed:
        raise typer.Exit(2)


def _speaks_unicode() -> bool:
    """Else a program that reads the JSON would find question marks in it."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _note(sentence: str) -> None:
    """Beside the texts, which alone go to stdout."""
    sys.stdout.flush()
    console(stderr=True).print(sentence, style="dim", markup=False)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def _stream(llm: LLM, job: Any, params: SamplingParams) -> RequestOutput:
    """Print the text while it grows; the last snapshot."""
    shown = ""
    last: RequestOutput | None = None
    for last in llm.stream(job, params) if isinstance(job, str) else llm.stream_chat(job, params):
        text = last.outputs[0].text if last.outputs else ""
        sys.stdout.write(printable(text[len(shown):]))
        sys.stdout.flush()
        shown = text
    print()
    if last is None:
        raise PacelineError("The engine ended without an answer.")
    return last


def _show(outs: list[RequestOutput], texts: list[str]) -> None:
    """Texts for a person: bare when there is one, under their prompts when there are several."""
    out = console()
    bare = len(outs) == 1 and len(outs[0].outputs) == 1
    for text, result in zip(texts, outs):
        for completion in result.outputs if result.error is None else []:
            if not bare:
                sample = f" [{completion.index}]" if len(result.outputs) > 1 else ""
                out.print(f"── {_first_line(text)}{sample}", style="dim", markup=False)
            out.print(printable(completion.text), markup=False)
            for entry in completion.logprobs or []:
                best = "  ".join(f"{token}:{value:.3f}" for token, value in entry.top.items())
                chosen = f"token {entry.token}  raw {entry.raw:.3f}  processed {entry.processed:.3f}  rank {entry.rank}"
                out.print(f"  {chosen}  {best}".rstrip(), style="dim", markup=False)


def _first_line(text: str, width: int = 60) -> str:
    line = printable(text).replace("\n", " ")
    return line if len(line) <= width else line[: width - 1] + "…"


def document(outs: list[RequestOutput], texts: list[str], model: str | None) -> dict[str, Any]:
    """What `--json` prints."""
    from paceline import __version__

    return {
        "paceline": __version__,
        "model": model or options.DEFAULT_MODEL,
        "results": [
            {
                "prompt": text,
                "prompt_token_ids": out.prompt_token_ids,
                "seed": out.seed,
                "outputs": [plain(completion) for completion in out.outputs],
                "prompt_logprobs": plain(out.prompt_logprobs),
                "metrics": plain(out.metrics),
                "speculation": plain(out.speculation),
                "error": None if out.error is None else str(out.error),
            }
            for text, out in zip(texts, outs)
        ],
    }


def write_trace(out: RequestOutput, path: Path) -> None:
    if out.trace is None:
        return
    try:
        write_whole(path, out.trace.to_json() + "\n")
    except OSError as error:
        raise RequestError(
            f"Cannot write the trace to {path}: {error.strerror}; choose another file.", "trace") from None
