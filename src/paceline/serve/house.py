"""House: what is one for a server, however many models it serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.serve.errors import RETRY_S, ApiError
from paceline.serve.llm import Serving
from paceline.serve.metrics import Metrics
from paceline.serve.options import ServeOptions
from paceline.serve.routes.stored import ResponseStore
from paceline.serve.telemetry import Telemetry
from paceline.serve.views import Views

if TYPE_CHECKING:
    from paceline.serve.calls import Service

log = logging.getLogger("paceline.serve")


class UnknownFields:
    """Those that clients of a lenient server have sent: the log hears of each once."""

    MOST = 256
    """Clients choose the names: beyond so many nobody is told."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def note(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._noted and len(self._noted) < self.MOST:
                self._noted.add(name)
                log.warning("requests have a field %r, which is unknown here and is dropped (--lenient)", name)


class ModelCard(NamedTuple):
    """What anybody may know of a model, or of an adapter as a model of its own."""

    name: str
    state: str
    """One of those of serve.pool."""
    parent: str | None = None
    """Of an adapter: the model it belongs to."""
    max_model_len: int | None = None
    """None: it was not loaded yet."""
    fingerprint: str | None = None
    size: int = 0
    """Bytes it takes when it is loaded, roughly; 0: not known."""


@dataclass
class House:
    """What every endpoint may ask for, whichever model is meant; one an app."""

    llm: Serving
    views: Views
    options: ServeOptions
    metrics: Metrics
    telemetry: Telemetry | None = None
    """None: nobody wants spans."""
    draining: bool = False
    """No new requests: the server is about to leave."""

    def __post_init__(self) -> None:
        self.unknown_fields = UnknownFields()
        self.responses = ResponseStore(self.options.stored_responses, self.options.stored_bytes)

    @property
    def cards(self) -> list[ModelCard]:
        """Of all models, the one that is meant where none is named first."""
        raise NotImplementedError

    def peek(self, name: str | None = None) -> Service | None:
        """The model of that name, or of that adapter, where it is loaded now; None: it is not. It may be unloaded as
        soon as somebody else has had a turn."""
        raise NotImplementedError

    @property
    def loaded(self) -> list[Service]:
        """All that are loaded now."""
        found = (self.peek(card.name) for card in self.cards if card.parent is None)
        return [service for service in found if service is not None]

    @property
    def models(self) -> list[str]:
        """What clients may name: models, and each adapter as a model of its own."""
        return [card.name for card in self.cards]

    def card(self, name: str) -> ModelCard:
        """Or a refusal: there is no such model."""
        found = next((card for card in self.cards if card.name == name), None)
        if found is None:
            known = ", ".join(repr(own) for own in self.models)
            raise ApiError(404, f"The model {name!r} does not exist here; this server has {known}.", param="model",
                           code="model_not_found")
        return found

    def check_open(self) -> None:
        if self.draining:
            raise self.leaving()
        if (outage := self.llm.outage) is not None:
            raise ApiError(503, outage, code="unavailable", headers={"retry-after": RETRY_S})

    def begin(self) -> None:
        """In the event loop, before the first request."""

    def begin_drain(self) -> None:
        """In the event loop, when the server is about to leave."""

    @staticmethod
    def leaving() -> ApiError:
        return ApiError(503, "The server is shutting down: try another one, or again later.", code="draining",
                        headers={"retry-after": RETRY_S, "connection": "close"})
