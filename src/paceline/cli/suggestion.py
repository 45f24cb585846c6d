"""A line in a chat with the default model that tells of a better one. Nobody waits for it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

_PATIENCE_S = 2.0


class Suggestion:
    """Looks, while the model loads, whether a network is there; what is not known by then is not said."""

    def __init__(self) -> None:
        self._online = False
        threading.Thread(target=self._look, name="paceline-suggestion", daemon=True).start()

    def _look(self) -> None:
        from paceline.errors import PacelineError
        from paceline.hub.client import Hub, offline

        if offline():
            return
        with suppress(OSError, PacelineError, UnicodeError):  # the last: of a name that no host can have
            place = urlsplit(Hub.of_environment().endpoint)
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname or "", port), _PATIENCE_S).close()
            self._online = True

    def line(self) -> str | None:
        from paceline.config import available_memory
        from paceline.hub.catalogue import SUGGESTED, suggestion
        from paceline.hub.store import here

        for name in SUGGESTED:
            if here(name) is not None:
                return f"a better model is here: paceline chat {name}"
        better = suggestion(available_memory()) if self._online else None
        if better is None:
            return None
        return (f"a better model for this machine: paceline chat {better.name} --pull "
                f"(fetches {better.bytes / 1e9:.1f} GB once)")
