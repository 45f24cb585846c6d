"""Logs as lines for people or as JSON objects for programs."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

_KNOWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "color_message",
                                                                          "taskName"}


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, and whatever was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03}",
                                  "level": record.levelname.lower(), "logger": record.name,
                                  "message": record.getMessage()}
        fields |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextLines(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        request_id, seconds = getattr(record, "request_id", None), getattr(record, "seconds", None)
        if seconds is not None:
            line += f" {seconds * 1000:.1f} ms"
        for name in [request_id] if request_id is not None else getattr(record, "request_ids", ()):
            line += f" [{name}]"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def configure(form: str) -> None:
    """The process's logs to stderr. For the command line only: a library leaves logging to its host."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
