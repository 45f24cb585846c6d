"""Adapters: those an engine has loaded, by the names that requests use."""

from __future__ import annotations

import logging

from paceline.errors import ConfigError, RequestError
from paceline.models.adapters import Adapter, bind
from paceline.models.interface import CausalLM
from paceline.models.load.adapters import PeftAdapter, read_adapter

log = logging.getLogger("paceline.engine")


class Adapters:
    """All of one model. A request keeps the adapter it was admitted with."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._loaded: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def load(self, name: str, path: str) -> None:
        """`path`: a PEFT adapter's folder, or a hub id."""
        self.add(name, read_adapter(path))

    def add(self, name: str, adapter: PeftAdapter) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"An adapter's name must be a text, got {name!r}.")
        if name in self._loaded:
            raise ConfigError(f"There is an adapter {name!r} already: choose another name.")
        bound = self._loaded[name] = bind(name, adapter, self._model.linears())
        log.info("adapter %r: additions to %d weights", name, len(bound.additions))

    def get(self, name: str | None) -> Adapter | None:
        """None: the model as it is."""
        if name is None:
            return None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(repr(own) for own in self._loaded) or "none"
            raise RequestError(f"There is no adapter {name!r}; loaded: {known}.", "adapter")
        return found
