"""Answers as a terminal shows them: wrapped between words, Markdown rendered while it comes.

What is shown does not depend on the pieces in which a text arrives: something is written once nothing that follows can
change it, which is after a word at the latest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rich.cells import cell_len

from paceline.cli.terminal import printable

Put = Callable[[str, str], None]
"""(text, rich style): writes both, and no newline."""

_MAY_MARK = re.compile(r"[ \t]*(#{0,6}|[-*+]|\*\*|\d{1,3}[.)]?|`{1,2}|~{1,2}|>)$")
"""The beginning of a line that could still become a marker."""
_MAY_END_CODE = re.compile(r"[ \t]*(`{0,2}|~{0,2})$")
"""Likewise a line of code that could still end it."""
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,3}[.)])[ \t]+")
_QUOTE = re.compile(r">[ \t]?")
_STYLES = {"code": "cyan", "bold": "bold", "heading": "bold underline"}


class Writer(Protocol):
    """Takes an answer in pieces."""

    def write(self, text: str) -> None: ...

    def end(self) -> None:
        """The answer is over, in the middle of a line or not."""


class AsItComes:
    """Nothing rendered, nothing wrapped: what a pipe and `--plain` get."""

    def __init__(self, put: Put) -> None:
        self._put = put

    def write(self, text: str) -> None:
        if text := printable(text):
            self._put(text, "")

    def end(self) -> None:
        self._put("\n", "")


@dataclass
class _Line:
    """How the line at hand goes on."""

    indent: str = ""
    """Before each of its further rows on the screen."""
    heading: bool = False
    wrapped: bool = True


class MarkdownWriter:
    """Headings, bold, code, lists and quotes; everything else is text."""

    def __init__(self, put: Put, width: Callable[[], int]) -> None:
        self._put, self._width = put, width
        self._held = ""
        """Of the beginning of a line, while it may be a marker; of a fence, all of it."""
        self._line: _Line | None = None
        """None: the next character begins one."""
        self._fence = ""
        """What ends the block of code that is open."""
        self._word = ""
        self._spaces = ""
        """Before the word."""
        self._column = 0
        self._bold = self._code = False
        self._ready: list[tuple[str, str]] = []
        """To be written, in pieces of one style each."""

    def write(self, text: str) -> None:
        for char in printable(text):
            if self._line is None:
                self._begin(char)
            else:
                self._go_on(char)
        self._deliver()

    def end(self) -> None:
        if self._held and not self._is_fence(self._held):
            self._open(self._held)
        self._flush()
        if self._line is not None or self._column:
            self._newline()
        self._deliver()

    # ---------------------------------------------------------------- lines

    def _begin(self, char: str) -> None:
        if char == "\n":
            if not self._is_fence(self._held):
                self._open(self._held)
                self._go_on(char)
            return
        self._held += char
        undecided = _MAY_END_CODE if self._fence else _MAY_MARK
        if not undecided.match(self._held) and not _FENCE.match(self._held):
            self._open(self._held)

    def _is_fence(self, line: str) -> bool:
        """Whether a whole line begins or ends a block of code, which it then does."""
        found = _FENCE.match(line)
        if found is None:
            return False
        rest = line[found.end():]
        if self._fence:
            if rest.strip() or not found[1].startswith(self._fence):
                return False
            self._fence = ""
        elif found[1][0] in rest:  # ```code``` within a line
            return False
        else:
            self._fence = found[1]
        self._held = ""
        return True

    def _open(self, start: str) -> None:
        """A line begins for which `start` was held."""
        self._held = ""
        self._line = line = _Line()
        if self._fence:
            self._show("  " + start, _STYLES["code"])
            return
        if heading := _HEADING.match(start):
            line.heading = True
            start = start[heading.end():]
        elif item := _ITEM.match(start):
            mark = item[2] if item[2][0].isdigit() else "•"
            self._show(f"{item[1]}{mark} ", "")
            line.indent = " " * self._column
            start = start[item.end():]
        elif quote := _QUOTE.match(start):
            line.indent = "│ "
            self._show(line.indent, "dim")
            start = start[quote.end():]
        elif start.startswith("|"):
            line.wrapped = False  # rows of a table
        for char in start:
            self._go_on(char)

    def _newline(self) -> None:
        self._show("\n", "")
        self._column, self._line, self._spaces = 0, None, ""
        self._bold = self._code = False

    # ---------------------------------------------------------------- words

    def _go_on(self, char: str) -> None:
        if self._fence:
            if char == "\n":
                self._newline()
            else:
                self._show(char, _STYLES["code"])
        elif char == "\n":
            self._flush()
            self._newline()
        elif char in " \t":
            self._flush()
            self._spaces += " " if char == " " else "    "
        else:
            self._word += char
            # Scripts without spaces break anywhere, and so does a word that fills a row.
            if cell_len(char) > 1 or cell_len(self._word) >= self._width():
                self._flush()

    def _flush(self) -> None:
        """Show the word, on the next row where this one has no room for it."""
        if not self._word:
            return
        style_before = self._style()
        parts = self._parts(self._word)
        long = sum(cell_len(text) for text, _ in parts)
        line = self._line or _Line()
        before = self._spaces
        if line.wrapped and self._column > cell_len(line.indent) and (
                self._column + len(before) + long > self._width()):
            self._show("\n", "")
            self._column = 0
            self._show(line.indent, "dim" if line.indent.startswith("│") else "")
        elif before:
            self._show(before, style_before)
        for text, style in parts:
            self._show(text, style)
        self._word = self._spaces = ""

    def _parts(self, word: str) -> list[tuple[str, str]]:
        """The word without its markers: characters and their styles."""
        parts: list[tuple[str, str]] = []
        at = 0
        while at < len(word):
            if word[at] == "`":
                self._code = not self._code
                at += 1
            elif word.startswith("**", at) and not self._code and (
                    self._bold or (at + 2 < len(word) and word[at + 2] != "*")):
                self._bold = not self._bold
                at += 2
            else:
                parts.append((word[at], self._style()))
                at += 1
        return parts

    def _style(self) -> str:
        if self._code:
            return _STYLES["code"]
        if self._line is not None and self._line.heading:
            return _STYLES["heading"]
        return _STYLES["bold"] if self._bold else ""

    def _show(self, text: str, style: str) -> None:
        if self._ready and self._ready[-1][1] == style:
            text_before, _ = self._ready.pop()
            self._ready.append((text_before + text, style))
        elif text:
            self._ready.append((text, style))
        self._column += cell_len(text)

    def _deliver(self) -> None:
        for text, style in self._ready:
            self._put(text, style)
        self._ready.clear()
