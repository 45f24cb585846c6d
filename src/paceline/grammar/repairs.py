"""Around what llguidance 1.9.1 gets wrong."""

from __future__ import annotations

import re

from paceline.errors import GrammarError
from paceline.grammar.expressions import QUOTED, class_of

_PART = re.compile(r"(?P<named>\\[pP](?:\{[^}]*\}|.))|(?P<nul>\\(?:x00|u0000|U0{8}|[xuU]\{0+\})|\0)|\\."
                   r"|(?P<verbose>\(\?[a-zA-Z]*x)|(?P<either>\|)|(?P<class>\[)", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|\[:\^?[a-z]+:\]|(?P<open>\[\^?\]?)|(?P<close>\])", re.DOTALL)


def quotable(pattern: str) -> str:
    r"""A pattern that means the same within a JSON text, where quotes and backslashes are escaped. To the library a
    class that holds all control characters holds these two as well (`[^"]` matches `\"`), and alternatives of one
    character are a class. So classes with the NUL but without these two do without the NUL, which no text needs.
    Raises a GrammarError for patterns of which that cannot be made."""
    parts, at, seen = [], 0, set[str | None]()
    while (found := _PART.search(pattern, at)) is not None:
        kind = found.lastgroup
        seen.add(kind)
        end = _end(pattern, found.start()) if kind == "class" else found.end()
        part = pattern[found.start():end]
        parts += [pattern[at:found.start()],
                  rf"[{part}&&[^\x00]]" if kind == "named" or (kind == "class" and _wide(part)) else part]
        at = end
    if "verbose" in seen or {"nul", "either"} <= seen:
        why = "the flag x" if "verbose" in seen else "the NUL beside alternatives"
        raise GrammarError(f"json_schema cannot be used: {why} cannot be kept in the pattern {pattern!r}. Write it "
                           "without.", "json_schema")
    return "".join([*parts, pattern[at:]])


def _wide(part: str) -> bool:
    """Whether a class may hold the NUL, but not both that are quoted."""
    found = class_of(part)
    return found is None or (found.holds("o", 0) and not all(found.holds("o", char) for char in QUOTED))


def _end(pattern: str, start: int) -> int:
    """Behind the class that begins at `start`. Where it has no end, the end of all: the library says so."""
    depth = 0
    for found in _IN_CLASS.finditer(pattern, start):
        depth += (found["open"] is not None) - (found["close"] is not None)
        if not depth:
            return found.end()
    return len(pattern)
