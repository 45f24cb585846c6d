"""`paceline chat`: a conversation that streams. Without a terminal it answers what is piped in, line by line, or one
built-in question, and leaves."""

from __future__ import annotations

import gc
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TextIO

import typer

from paceline.cli import options
from paceline.cli.chat_commands import is_command, obey
from paceline.cli.chat_input import ReadLine, read_message, terminal_lines
from paceline.cli.conversation import ChatEngine, Conversation
from paceline.cli.files import checked, not_text
from paceline.cli.suggestion import Suggestion
from paceline.cli.terminal import console, load_llm
from paceline.errors import RequestError

BUILT_IN_QUESTION = "What is the capital of France? Answer in one sentence."
PAGE_HINT = "`paceline serve` opens the same model to programs, and to a browser at http://127.0.0.1:8000/"
PATIENCE_S = 1.0
"""How long to wait for the first piped line once the model is there: some pipes never say anything, and never end."""


def interact(conversation: Conversation, read_line: ReadLine = input) -> None:
    """Read messages until /exit or end of input."""
    while True:
        try:
            message = read_message(read_line)
        except EOFError:
            conversation.out.print()
            return
        except KeyboardInterrupt:
            conversation.out.print("\n/exit or Ctrl-D to leave", style="dim")
            continue
        if not message:
            continue
        if not is_command(message):
            conversation.ask(message)
        elif not obey(conversation, message):
            return


def answer(conversation: Conversation, lines: Iterator[str]) -> bool:
    """The same with nobody to type: messages are shown. Returns whether all were answered."""
    def read_line(_prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    fine = True
    with suppress(EOFError):
        while True:
            message = read_message(read_line)
            if not message:
                continue
            conversation.out.print(f"> {message}", style="bold", markup=False)
            if not is_command(message):
                fine = conversation.ask(message) and fine
            elif not obey(conversation, message):
                break
    return fine


def piped(stream: TextIO | None) -> Iterator[str]:
    """The lines somebody piped in; the built-in question if there are none."""
    found = False
    try:
        for line in stream if stream is not None and _ready(stream) else ():
            found = found or bool(line.strip())
            yield checked(line.rstrip("\r\n"))
    except UnicodeDecodeError as problem:
        raise not_text(problem.encoding, problem.reason) from None
    if not found:
        yield BUILT_IN_QUESTION


def _ready(stream: TextIO) -> bool:
    """Whether reading from it gives something, be it the end, without waiting longer than PATIENCE_S."""
    with suppress(OSError, ValueError):  # a stream that is no file of the system never waits
        return bool(select.select([stream], [], [], PATIENCE_S)[0])
    return True


def switcher(load: Callable[[str | None], ChatEngine], name: str | None) -> Callable[[str, Conversation], None]:
    """What /model does. The old model goes before the new one comes: two would rarely fit. Where the new one cannot
    be had, or is not waited for, the old one comes back."""
    def switch(wanted: str, conversation: Conversation) -> None:
        nonlocal name
        from paceline.models.load.resolve import resolve

        resolve(wanted)  # a wrong name costs nothing
        del conversation.llm
        gc.collect()
        try:
            conversation.llm = load(wanted)
            name = wanted
        except BaseException as problem:
            conversation.llm = load(name)
            if isinstance(problem, KeyboardInterrupt):
                raise RequestError(f"{wanted} was not waited for: the model before it answers.") from None
            raise

    return switch


def chat(
    model: options.ModelArgument = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.ChatTemperature = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.9,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    plain: options.Plain = False,
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
    """Chat with a model. Without a terminal: answer the lines piped in, or one built-in question, and leave."""
    from paceline.request import SamplingParams

    interactive = sys.stdin is not None and sys.stdin.isatty()
    if temperature is None:
        temperature = 0.2 if interactive else 0.0
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed,
    )
    out = console()
    better = Suggestion() if interactive and model is None and out.is_terminal else None
    load = partial(
        load_llm, device=device, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization,
        deterministic=deterministic, max_model_len=max_model_len, speculation=options.speculation(speculation),
        heads=options.heads(head), tensor_parallel_size=tensor_parallel_size,
    )
    conversation = Conversation(load(model), params, out, system, plain, switcher(load, model))
    if interactive:
        out.print(model or options.DEFAULT_MODEL, style="bold", markup=False, end="  ")
        out.print("/help for commands, Ctrl-D to leave", style="dim")
        out.print(PAGE_HINT, style="dim")
        if better is not None and (line := better.line()) is not None:
            out.print(line, style="dim", markup=False)
        interact(conversation, terminal_lines())
        return
    fine = answer(conversation, piped(sys.stdin))
    out.print(PAGE_HINT, style="dim")
    if not fine:
        raise typer.Exit(2)
