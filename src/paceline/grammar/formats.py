"""The formats of texts that are kept, and what is kept of them beyond what the library does."""

from __future__ import annotations

KNOWN_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Others say what a text is for, and are annotations."""
SAME_FORMATS = {f"uuid{version}": "uuid" for version in range(1, 9)}
_YEAR, _CLOCK = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-", r"\d\d:\d\d:[0-5]"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DAY = rf"^(?:\d{{4}}-(?:0[13-9]|1|02-[01]|02-2[0-8])|(?:\d\d{_LEAP}|(?:00|{_LEAP})00)-02-29)"
"""How long other months are the library knows; to it every February has 29 days."""
FORMAT_PATTERNS = {"date": (f"^{_YEAR}", _DAY), "time": (f"^{_CLOCK}",),
                   "date-time": (f"^{_YEAR}.{{6}}{_CLOCK}", _DAY)}
"""What clients can read: calendars begin with the year 1 and have leap years, and a minute has sixty seconds."""
