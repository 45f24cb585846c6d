"""Thoughts: what reasoning models write between <think> and </think> before they answer."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.serve.tool_formats.events import AnswerParser, Event, Reasoning, overlap
from paceline.serve.tool_formats.harmony import CHANNEL, END, MESSAGE, START
from paceline.serve.tool_formats.lark import Lark

OPEN, CLOSE = "<think>", "</think>"
NEVER, MAYBE, BEGUN = "never", "maybe", "begun"
"""Whether an answer begins with thoughts: the last, where the prompt has opened them already."""
PROMPT_END = 16
"""Tokens of a prompt's end that are looked at."""


def expected(template: str | None, prompt_end: str) -> str:
    """By what the chat template says of thoughts, and how the prompt that it wrote ends."""
    if template is None or (CLOSE not in template and OPEN not in template):
        return NEVER
    end = prompt_end.rstrip()
    return BEGUN if end.endswith(OPEN) else NEVER if end.endswith(CLOSE) else MAYBE


def before_answer(expects: str, lark: Lark) -> str | None:
    """What comes before a structure: thoughts, which are free. None: nothing."""
    if expects == NEVER:
        return None
    thoughts = f"{lark.until(CLOSE)} /\\n{{0,2}}/"
    return lark.whole(thoughts if expects == BEGUN else f"({lark.tag(OPEN)} {thoughts})?")


def before_message(called: bool, lark: Lark) -> str:
    """The same in Harmony, where the answer is a message of its own. A call brings its channel along."""
    thoughts = (f'({lark.tag(CHANNEL)} "analysis" {lark.tag(MESSAGE)} {lark.until(END)} {lark.tag(START)} '
                '"assistant")?')
    return lark.whole(thoughts if called else f'{thoughts} {lark.tag(CHANNEL)} "final" {lark.tag(MESSAGE)}')


class ThinkParser(AnswerParser):
    """Tells thoughts apart, where a text begins with some, and leaves the rest to another parser. Space around the tags
    is theirs."""

    def __init__(self, inner: AnswerParser, begun: bool) -> None:
        self._inner = inner
        self.thinking = begun
        self._begins = not begun
        self._unread = ""
        self._ended = self._told = False

    @property
    def over(self) -> bool:
        return self._inner.over

    def push(self, text: str) -> Iterator[Event]:
        self._unread += text
        if self._begins:
            self._look()
        if self.thinking:
            yield from self._think()
        if self.thinking or self._begins:
            return
        if self._ended:
            self._unread = self._unread.lstrip()
            self._ended = not self._unread
        rest, self._unread = self._unread, ""
        if rest:
            yield from self._inner.push(rest)

    def _look(self) -> None:
        """Whether it begins with thoughts, if that can be said yet."""
        text = self._unread.lstrip()
        if text.startswith(OPEN):
            self._begins, self.thinking, self._unread = False, True, text[len(OPEN):]
        elif text and not OPEN.startswith(text):
            self._begins = False

    def _think(self) -> Iterator[Event]:
        text = self._unread if self._told else self._unread.lstrip()
        at = text.find(CLOSE)
        end = at if at >= 0 else len(text) - overlap(text, CLOSE)
        thought = text[:end].rstrip()
        if thought:
            self._told = True
            yield Reasoning(thought)
        self._unread = text[len(thought):]
        if at >= 0:
            self.thinking, self._ended, self._unread = False, True, text[at + len(CLOSE):]

    def end(self) -> Iterator[Event]:
        rest, self._unread = self._unread, ""
        if self.thinking:
            if rest.strip():
                yield Reasoning(rest)
        elif rest and not self._ended:
            yield from self._inner.push(rest)
        yield from self._inner.end()
