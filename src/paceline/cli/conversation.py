"""Conversation: the messages of a chat so far, and how an answer to them is streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.cli.files import half_characters, read_bytes, write_whole
from paceline.cli.markdown import AsItComes, MarkdownWriter, Writer
from paceline.cli.speed import drafting
from paceline.cli.terminal import ProgressCallback, print_error, quiet_keys, soft_interrupts, waiting
from paceline.errors import PacelineError, RequestError

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from paceline.request import RequestOutput, SamplingParams

_MOST_BYTES = 1 << 26
"""Of a conversation that is loaded."""
ROLES = ("system", "user", "assistant")
_ENDINGS: Mapping[str | None, str] = {"length": "cut at the longest answer (--max-tokens)"}
"""What the footnote says of ends other than the model's own."""


class ChatEngine(Protocol):
    """What the conversation needs of an LLM."""

    def stream_chat(self, messages: list[Any], params: SamplingParams, /, *,
                    progress: ProgressCallback) -> Iterator[RequestOutput]: ...


@dataclass
class Conversation:
    """The messages so far and how to answer them; owns printing, not input."""

    llm: ChatEngine
    params: SamplingParams
    out: Console
    system: str | None = None
    plain: bool = False
    """Answers are shown as they come, on a terminal too."""
    switch: Callable[[str, Conversation], None] | None = None
    """Puts another model in the place of `llm`, or raises and leaves it."""
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

    def retry(self) -> bool:
        """Ask the last question again; False: there is none, or the answer failed, and the old one stays."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            return False
        before, self.messages = self.messages, self.messages[:places[-1]]
        if not self.ask(before[places[-1]]["content"]):
            self.messages = before
            return False
        return True

    @property
    def last_answer(self) -> str | None:
        return next((one["content"] for one in reversed(self.messages) if one["role"] == "assistant"), None)

    def save(self, path: Path) -> None:
        try:
            write_whole(path, json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"Cannot write {path}: {error.strerror}; choose another file.") from None

    def load(self, path: Path) -> None:
        """What save() wrote, or a bare list of messages as OpenAI's API has them."""
        try:
            given = read_bytes(path, _MOST_BYTES)
        except OSError as error:
            raise RequestError(f"Cannot read {path}: {error.strerror}; name a file that /save wrote.") from None
        if len(given) > _MOST_BYTES:
            raise RequestError(f"{path} has more than {_MOST_BYTES >> 20} MB: name a file that /save wrote.")
        try:
            content = json.loads(given)
        except (ValueError, RecursionError):
            raise RequestError(f"{path} is not JSON: name a file that /save wrote.") from None
        found = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(found, list) or not all(
                isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str)
                and not half_characters(one["content"]) for one in found):
            raise RequestError(f"{path} holds no conversation: messages have a role ({', '.join(ROLES)}) and a text "
                               "as content.")
        self.messages = [{"role": one["role"], "content": one["content"]} for one in found]
        system = self.messages[0] if self.messages and self.messages[0]["role"] == "system" else None
        self.system = None if system is None else system["content"]

    # ---------------------------------------------------------------- an answer

    def _stream(self) -> str:
        shown = ""
        tokens = 0
        last: RequestOutput | None = None
        began = first = time.perf_counter()
        writer = self._writer()
        with quiet_keys(), soft_interrupts() as stop, waiting(self.out) as wait:
            # Closing the generator is what cancels the request and frees its cache blocks.
            snapshots = cast("Generator[RequestOutput]",
                             self.llm.stream_chat(self.messages, self.params, progress=wait.progress))
            with closing(snapshots):
                for last in snapshots:
                    wait.over()
                    if last.error is not None:
                        raise last.error
                    completion = last.outputs[0]
                    if not tokens:
                        first = time.perf_counter()
                    tokens = len(completion.token_ids)
                    self._write(writer, completion.text[len(shown):])
                    shown = completion.text
                    if stop.raised:
                        break
        ended = time.perf_counter()
        writer.end()
        ending = None if last is None else last.outputs[0].finish_reason
        self._footnote(last, tokens, first - began, ended - first, "stopped" if stop.raised else _ENDINGS.get(ending))
        return shown

    def _writer(self) -> Writer:
        if self.plain or not self.out.is_terminal:
            return AsItComes(self._put)
        return MarkdownWriter(self._put, lambda: self.out.width)

    def _put(self, text: str, style: str) -> None:
        self.out.out(text, style=style or None, end="", highlight=False)

    def _write(self, writer: Writer, text: str) -> None:
        writer.write(text)
        self.out.file.flush()

    def _footnote(self, last: RequestOutput | None, tokens: int, wait: float, streaming: float,
                  ending: str | None) -> None:
        parts = [f"{tokens} tokens"]
        if tokens > 1 and streaming > 0:
            parts.append(f"{(tokens - 1) / streaming:.1f} tok/s")
        if last is not None and last.speculation is not None and (found := drafting([last.speculation])):
            parts.append(found)
        parts.append(f"first after {wait:.2f} s")
        if ending:
            parts.append(ending)
        self.out.print(" · ".join(parts), style="dim")
