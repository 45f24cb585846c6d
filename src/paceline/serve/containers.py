"""How many lists and objects a JSON text of a client's may be made of."""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.serve.errors import ApiError

MOST_CONTAINERS = 1 << 16
"""Lists and objects of one text. Reading them holds everybody up, many times as long as a text of the same size."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""One that does not end goes on to the end of the text: were it none, every quote in it would be tried as a beginning,
each time to the end."""


def check_containers(text: bytes, what: str = "The body") -> None:
    """Refuse JSON that is made of too many lists and objects. Texts in it may hold as many brackets as they like."""
    if text.count(b"[") + text.count(b"{") <= MOST_CONTAINERS:
        return
    bare = _STRING.sub(b"", text)
    count = bare.count(b"[") + bare.count(b"{")
    if count > MOST_CONTAINERS:
        raise ApiError(400, f"{what} has {count} lists and objects and this server takes {MOST_CONTAINERS}: send "
                       "less at once.")


def read_json(text: str, what: str) -> Any:
    """JSON that came as a text within a body: there, none of its lists and objects were counted."""
    check_containers(text.encode("utf-8", "surrogatepass"), what)
    return json.loads(text)
