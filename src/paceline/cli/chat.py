"""`paceline chat`: a conversation that streams. Without a terminal it answers what is piped in, line by line, or one
built-in question, and leaves."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

import typer

from paceline.cli import options
from paceline.cli.suggestion import Suggestion
from paceline.cli.terminal import console, load_llm, print_error, printable, soft_interrupts
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from rich.console import Console

    from paceline.request import RequestOutput, SamplingParams

BUILT_IN_QUESTION = "What is the capital of France? Answer in one sentence."
PAGE_HINT = "`paceline serve` opens the same model to programs, and to a browser at http://127.0.0.1:8000/"
PATIENCE_S = 1.0
"""How long to wait for the first piped line once the model is there: some pipes never say anything, and never end."""
HELP = """/help            this list
/system TEXT     start over with this system prompt (without TEXT: none)
/reset           forget the conversation
/exit            leave (Ctrl-D too); Ctrl-C stops an answer"""

_ENDINGS: Mapping[str | None, str] = {"length": "cut at the longest answer (--max-tokens)"}
"""What the footnote says of ends other than the model's own."""


class ChatEngine(Protocol):
    """What the conversation needs of an LLM."""

    def stream_chat(self, messages: list[Any], params: SamplingParams, /) -> Iterator[RequestOutput]: ...


@dataclass
class Conversation:
    """The messages so far and how to answer them; owns printing, not input."""

    llm: ChatEngine
    params: SamplingParams
    out: Console
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str) -> bool:
        """Stream the answer to `question`. An answer that fails leaves the conversation as it was: then False."""
        self.messages.append({"role": "user", "content": question})
        try:
            answer = self._stream()
        except PacelineError as error:
            self.messages.pop()
            self.out.print()
            print_error(error)
            if any(message["role"] == "assistant" for message in self.messages):
                self.out.print("the conversation is as it was; /reset starts a new one", style="dim")
            return False
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        return True

    def _stream(self) -> str:
        shown = ""
        tokens = 0
        ending = None
        began = first = time.perf_counter()
        # Closing the generator is what cancels the request and frees its cache blocks.
        snapshots = cast("Generator[RequestOutput]", self.llm.stream_chat(self.messages, self.params))
        with soft_interrupts() as stop, closing(snapshots):
            for snapshot in snapshots:
                if snapshot.error is not None:
                    raise snapshot.error
                completion = snapshot.outputs[0]
                if not tokens:
                    first = time.perf_counter()
                tokens = len(completion.token_ids)
                self._write(completion.text[len(shown):])
                shown, ending = completion.text, completion.finish_reason
                if stop.raised:
                    break
        ended = time.perf_counter()
        self._write("\n")
        self._footnote(tokens, first - began, ended - first, "stopped" if stop.raised else _ENDINGS.get(ending))
        return shown

    def _write(self, text: str) -> None:
        self.out.file.write(printable(text))
        self.out.file.flush()

    def _footnote(self, tokens: int, wait: float, streaming: float, ending: str | None) -> None:
        parts = [f"{tokens} tokens"]
        if tokens > 1 and streaming > 0:
            parts.append(f"{(tokens - 1) / streaming:.1f} tok/s")
        parts.append(f"first after {wait:.2f} s")
        if ending:
            parts.append(ending)
        self.out.print(" · ".join(parts), style="dim")


def interact(conversation: Conversation, read_line: Any = input) -> None:
    """Read lines until /exit or end of input."""
    while True:
        try:
            line = read_line("> ").strip()
        except EOFError:
            conversation.out.print()
            return
        except KeyboardInterrupt:
            conversation.out.print("\n/exit or Ctrl-D to leave", style="dim")
            continue
        if not line:
            continue
        if not line.startswith("/"):
            conversation.ask(line)
        elif not _obey(conversation, line):
            return


def answer(conversation: Conversation, questions: Iterable[str]) -> bool:
    """The same with nobody to type: questions are shown. Returns whether all were answered."""
    fine = True
    for question in questions:
        conversation.out.print(f"> {question}", style="bold", markup=False)
        if not question.startswith("/"):
            fine = conversation.ask(question) and fine
        elif not _obey(conversation, question):
            break
    return fine


def piped(stream: TextIO | None) -> Iterator[str]:
    """The lines somebody piped in; the built-in question if there are none."""
    found = False
    try:
        for line in stream if stream is not None and _ready(stream) else ():
            if line.strip():
                found = True
                yield line.strip()
    except UnicodeDecodeError as problem:
        raise ConfigError(f"What was piped in is not {problem.encoding} text ({problem.reason}): convert it "
                          "first.") from None
    if not found:
        yield BUILT_IN_QUESTION


def _ready(stream: TextIO) -> bool:
    """Whether reading from it gives something, be it the end, without waiting longer than PATIENCE_S."""
    with suppress(OSError, ValueError):  # a stream that is no file of the system never waits
        return bool(select.select([stream], [], [], PATIENCE_S)[0])
    return True


def _obey(conversation: Conversation, line: str) -> bool:
    """Carry out a /command; False: leave."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.reset()
        conversation.out.print("forgotten", style="dim")
    elif name == "/system":
        conversation.system = rest.strip() or None
        conversation.reset()
        conversation.out.print("system prompt set, conversation forgotten", style="dim")
    elif name == "/help":
        conversation.out.print(HELP, markup=False)
    else:
        conversation.out.print(f"unknown command {name}; /help lists them", style="dim", markup=False)
    return True


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
    llm = load_llm(
        model, device=device, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization, deterministic=deterministic,
        max_model_len=max_model_len, speculation=options.speculation(speculation), heads=options.heads(head),
        tensor_parallel_size=tensor_parallel_size,
    )
    conversation = Conversation(llm, params, out, system)
    if interactive:
        _enable_line_editing()
        out.print(model or options.DEFAULT_MODEL, style="bold", markup=False, end="  ")
        out.print("/help for commands, Ctrl-D to leave", style="dim")
        out.print(PAGE_HINT, style="dim")
        if better is not None and (line := better.line()) is not None:
            out.print(line, style="dim", markup=False)
        interact(conversation)
        return
    fine = answer(conversation, piped(sys.stdin))
    out.print(PAGE_HINT, style="dim")
    if not fine:
        raise typer.Exit(2)


def _enable_line_editing() -> None:
    """Importing readline is what gives input() history and editing; some systems have none."""
    with suppress(ImportError):
        import readline  # noqa: F401
