"""What a person types in a chat, as messages: line editing, Tab, pasted lines, and \"\"\"blocks\"\"\"."""

from __future__ import annotations

from collections.abc import Callable

from paceline.cli.chat_commands import completions

ReadLine = Callable[[str], str]
"""(prompt) -> a line, which holds newlines where several were pasted; EOFError at the end."""
QUOTES = '"""'


def read_message(read_line: ReadLine) -> str:
    """The next message, which may be empty."""
    line = read_line("> ").strip()
    if not line.startswith(QUOTES):
        return line
    text = line.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + read_line("… ")
        except EOFError:
            return text.strip("\n")
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def terminal_lines() -> ReadLine:
    """input(), with history and editing where the system has them."""
    try:
        import readline
    except ImportError:
        return input
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")  # several lines that are pasted stay together
        readline.parse_and_bind("tab: complete")
    found: list[str] = []

    def complete(_text: str, state: int) -> str | None:
        nonlocal found
        if state == 0:
            found = completions(readline.get_line_buffer()[:readline.get_endidx()])
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    return input
