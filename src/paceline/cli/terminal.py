"""What commands share to talk to a person: consoles, one-sentence errors, the progress of loading a model."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.status import Status

    from paceline import LLM

ProgressCallback = Callable[[str, int, int | None], None]
"""(stage, done, total): called by loaders, from any thread; total is None or 0 while it is unknown."""

_STAGES = {
    "wait": "waiting for another process that fetches the model",
    "download": "fetching the model",
    "extract": "unpacking the model",
    "verify": "checking the model",
    "capture": "capturing steps for the card",
}

_BYTES_FROM = 1 << 16
"""Stages that count further than this count bytes; smaller ones count things (tensors, files)."""


def console(*, stderr: bool = False) -> Console:
    """A console on the process's present stdout or stderr (looked up now, so that tests can capture it)."""
    from rich.console import Console

    return Console(file=sys.stderr if stderr else sys.stdout, highlight=False, soft_wrap=True)


def print_error(error: BaseException) -> None:
    """One red sentence on stderr."""
    text = " ".join(str(error).split()) or type(error).__name__
    console(stderr=True).print(f"error: {text}", style="red", markup=False)


def printable(text: str) -> str:
    """Text that cannot steer the terminal: control characters other than newline and tab are dropped."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))


class LoadingBars:
    """Turns (stage, done, total) reports into one rich bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        total = total or None
        task = self._tasks.get(stage)
        if task is None:
            task = self._tasks[stage] = self._progress.add_task(_STAGES.get(stage, stage), total=total, amount="")
        self._progress.update(task, completed=done, total=total, amount=_amount(done, total))


def _amount(done: int, total: int | None) -> str:
    if max(done, total or 0) < _BYTES_FROM:
        return f"{done}" if total is None else f"{done}/{total}"
    return f"{done / 1e6:.1f} MB" if total is None else f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"


@contextmanager
def loading_bars() -> Iterator[ProgressCallback]:
    """Progress bars on stderr that vanish when loading is done; without a terminal, one line per stage."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield _one_line_a_stage()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text, amount = TextColumn("{task.description}"), TextColumn("{task.fields[amount]}")
    with Progress(text, BarColumn(), amount, TimeRemainingColumn(), console=out, transient=True) as progress:
        progress.add_task("starting", total=None, amount="")  # moves from the start to the end
        yield LoadingBars(progress)


def _one_line_a_stage() -> ProgressCallback:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int | None) -> None:
        if stage not in seen:
            seen.add(stage)
            print(f"{_STAGES.get(stage, stage)} ...", file=sys.stderr, flush=True)

    return report


class Waiting:
    """A line that moves until the first word of an answer, and says how much of the prompt is read."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def begin(self) -> None:
        if self._status is not None:
            self._status.start()

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if self._status is not None and total:
            self._status.update(f"[dim]reading, {done:,} of {total:,} tokens[/dim]")

    def over(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def waiting(out: Console) -> Iterator[Waiting]:
    """Such a line, on a terminal."""
    wait = Waiting(out.status("[dim]reading[/dim]") if out.is_terminal else None)
    wait.begin()
    try:
        yield wait
    finally:
        wait.over()


@contextmanager
def quiet_keys() -> Iterator[None]:
    """While inside, what is typed does not show up in the middle of an answer; the terminal keeps it, and whoever reads
    next finds it."""
    if sys.stdin is None or not sys.stdin.isatty() or sys.platform == "win32":
        yield
        return
    import termios

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)


@dataclass
class StopFlag:
    """Whether the user pressed Ctrl-C."""

    raised: bool = False


@contextmanager
def soft_interrupts() -> Iterator[StopFlag]:
    """While inside, the first Ctrl-C only raises a flag, so that a running step can end and the request be cancelled
    in good order; a second one interrupts at once."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_interrupt(number: int, frame: Any) -> None:
        if flag.raised:
            raise KeyboardInterrupt
        flag.raised = True

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        # None: whoever set the handler before was not Python, and it cannot be put back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)


def load_llm(model: str | None, **options: Any) -> LLM:
    """Build the engine, showing what is fetched and read. Options that are None are left to their defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    with loading_bars() as progress:
        from paceline import LLM  # takes seconds by itself

        return LLM(model, progress=progress, **given)
