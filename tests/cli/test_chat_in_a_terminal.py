"""`paceline chat` in a terminal of its own: keys, pasting, Tab, Ctrl-C, and what is typed while an answer comes."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")
PATIENCE_S = 60.0
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """A person at a keyboard."""

    def __init__(self, tmp_path: Path) -> None:
        tests = Path(__file__).parents[1]
        # What the shell says of colours, of bytecode and of a personal set-up of readline is not this test's matter.
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "INPUTRC": str(tmp_path / "none"),
                       "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]), "NO_COLOR": ""}
        del environment["NO_COLOR"]
        self.process, self._screen = pty.fork()
        if self.process == 0:
            os.execve(sys.executable, [sys.executable, str(tests / "cli" / "chat_in_terminal.py")], environment)
        self.seen = ""
        self._read = 0

    def press(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str) -> str:
        """What was shown since what was waited for last, up to and with this text; styles left out."""
        until = time.monotonic() + PATIENCE_S
        while (found := (shown := STYLE.sub("", self.seen)).find(text, self._read)) < 0:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._screen], [], [], left)[0]:
                pytest.fail(f"{text!r} did not come; on the screen: {self.seen!r}")
            try:
                self.seen += os.read(self._screen, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"the chat has ended before {text!r}; on the screen: {self.seen!r}")
        begin, self._read = self._read, found + len(text)
        return shown[begin:self._read]

    def leave(self) -> int:
        """The exit code, once the chat has ended by itself."""
        process, self.process = self.process, 0
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def close(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            self.leave()
        os.close(self._screen)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    try:
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.close()


def test_a_whole_conversation(terminal: Terminal) -> None:
    # Several lines that are pasted are one message; nothing is asked before Enter.
    terminal.press("\x1b[200~first\rsecond\x1b[201~")
    terminal.wait_for("second")
    terminal.press("\r")
    shown = terminal.wait_for("tok/s")
    assert r"Told: 'first\nsecond'" in shown
    assert "reading, 2,345 of 2,345 tokens" in shown, "nothing moved while the prompt was read"
    assert "\x1b[1mTold" in terminal.seen, "Markdown is rendered"
    terminal.wait_for("> ")

    # Tab completes a command.
    terminal.press("/he\t\r")
    terminal.wait_for("/system TEXT")
    terminal.wait_for("> ")

    # What is typed during an answer is not shown in the middle of it, and stands at the next prompt.
    terminal.press("an endless one\r")
    terminal.wait_for("Told: 'an endless")
    terminal.press("typed ahead\r")
    os.kill(terminal.process, signal.SIGINT)  # as Ctrl-C does, which would also have the terminal forget the keys
    assert "typed ahead" not in terminal.wait_for("stopped")
    terminal.wait_for("> typed ahead")
    terminal.wait_for("Told: 'typed ahead'")
    terminal.wait_for("> ")

    # Ctrl-C stops an answer and keeps the chat.
    terminal.press("another endless one\r")
    terminal.wait_for("Told: 'another endless")
    terminal.press("\x03")
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    terminal.press("/exit\r")
    assert terminal.leave() == 0
