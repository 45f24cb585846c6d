"""Around what llguidance 1.9.1 gets wrong."""

from __future__ import annotations

import re

_WIDE = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[\^\]?", re.DOTALL)


def quotable(pattern: str) -> str:
    r"""A pattern that means the same within a JSON text, where quotes and backslashes are escaped. To the library a
    class that holds all control characters holds these two as well (`[^"]` matches `\"`), so classes that may be so
    wide do without the NUL, which no text needs."""
    return _WIDE.sub(_without_nul, pattern)


def _without_nul(found: re.Match[str]) -> str:
    part = found[0]
    if part.startswith("[^"):
        return r"[^\x00" + (r"\]" if part.endswith("]") else "")
    return rf"[{part}&&[^\x00]]" if part[1] in "pP" else part
