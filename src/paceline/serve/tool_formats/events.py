"""What an answer's text consists of, told as it is written, and what reads it so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Content | Reasoning | CallBegun | CallArguments


class AnswerParser(ABC):
    """Fed with text as it grows: the events together are the same however it is cut into pieces. Everything that is
    neither a call nor a thought comes out again as Content."""

    thinking = False
    """Whether what comes next is a thought."""

    @property
    def over(self) -> bool:
        """Whether nothing that comes is of use any more."""
        return False

    @abstractmethod
    def push(self, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def end(self) -> Iterator[Event]: ...


class StatefulParser(AnswerParser):
    """Reads as far as it can in one state after the other; what it cannot read yet waits for more text."""

    def __init__(self) -> None:
        self._unread = ""
        self._read = self._text
        """How what comes next is read: it takes from `_unread`, and may set another state."""

    @abstractmethod
    def _text(self) -> Iterator[Event]:
        """Outside of calls, where every text begins."""

    def push(self, text: str) -> Iterator[Event]:
        self._unread += text
        while self._unread:
            before = self._read, len(self._unread)
            yield from self._read()
            if before == (self._read, len(self._unread)):
                return


class PlainText(AnswerParser):
    """No tools: all of it is for the reader."""

    def push(self, text: str) -> Iterator[Event]:
        return content(text)

    def end(self) -> Iterator[Event]:
        return iter(())


class CallsOnly(AnswerParser):
    """A grammar saw to it that the text is calls: what is none (yet, where the text was cut) is the grammar's, and
    nothing for the reader."""

    def __init__(self, inner: AnswerParser, names: Iterable[str]) -> None:
        self._inner = inner
        self._names = list(names)
        self._begun = False

    def push(self, text: str) -> Iterator[Event]:
        return self._calls(self._inner.push(text))

    def end(self) -> Iterator[Event]:
        yield from self._calls(self._inner.end())
        if not self._begun and len(self._names) == 1:  # cut before it had a name, and there is one it can be
            yield CallBegun(0, self._names[0])

    def _calls(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            self._begun = self._begun or isinstance(event, CallBegun)
            if not isinstance(event, Content):
                yield event


class UntilCallsEnd(AnswerParser):
    """Nothing is told behind the calls: whoever calls a function waits for what it says."""

    def __init__(self, inner: AnswerParser) -> None:
        self._inner = inner
        self._called = self._rambles = False

    @property
    def over(self) -> bool:
        return self._rambles or self._inner.over

    def push(self, text: str) -> Iterator[Event]:
        return iter(()) if self._rambles else self._before(self._inner.push(text))

    def end(self) -> Iterator[Event]:
        return iter(()) if self._rambles else self._before(self._inner.end())

    def _before(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            if self._called and isinstance(event, Content):
                self._rambles = self._rambles or not event.text.isspace()
            elif not self._rambles:
                self._called = self._called or isinstance(event, CallBegun)
                yield event


def content(text: str) -> Iterator[Event]:
    if text:
        yield Content(text)


def overlap(text: str, tag: str) -> int:
    """How many of the last characters might be the beginning of `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0
