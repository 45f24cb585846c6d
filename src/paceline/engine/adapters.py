"""Adapters: those an engine has loaded, by the names that requests use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from paceline.engine.parallel.leader import Leader
from paceline.errors import ConfigError, RequestError
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.adapters import Adapter, bind
from paceline.models.interface import CausalLM
from paceline.models.load.adapters import PeftAdapter, read_adapter

log = logging.getLogger("paceline.engine")


class Adapters:
    """All of one model. A request keeps the adapter it was admitted with."""

    def __init__(self, model: CausalLM, in_use: Callable[[], Iterable[Adapter]]) -> None:
        """`in_use`: those of requests that have not ended."""
        self.slots = AdapterSlots()
        self._model = model
        self._in_use = in_use
        self._loaded: dict[str, Adapter] = {}
        self._mirror = model if isinstance(model, Leader) else None
        """Other ranks, who keep their parts of each adapter in the same slots."""
        self._retired: list[Adapter] = []
        """Without a name, in the slots they had: requests that were admitted with them may still run."""

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    @property
    def names_by_revision(self) -> dict[str, str]:
        """From any thread."""
        return {adapter.revision: adapter.name for adapter in list(self._loaded.values())}

    def load(self, name: str, path: str) -> None:
        """`path`: a PEFT adapter's folder, or a hub id."""
        self.add(name, read_adapter(path))

    def add(self, name: str, adapter: PeftAdapter) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"An adapter's name must be a text, got {name!r}.")
        if name in self._loaded:
            raise ConfigError(f"There is an adapter {name!r} already: choose another name.")
        self._free_slots()
        try:
            additions = bind(name, adapter, self._model.linears())
            slot = self.slots.load(additions)
        except torch.OutOfMemoryError as problem:
            raise ConfigError(f"There is no memory left for the adapter {name!r}: unload another, or give the cache "
                              "fewer kv_blocks.") from problem
        if self._mirror is not None:
            self._mirror.load_adapter(name, adapter, slot)
        self._loaded[name] = Adapter(name, adapter.revision, slot)
        log.info("adapter %r: additions to %d weights", name, len(additions))

    def unload(self, name: str) -> None:
        """No request may name it any more; those that have it keep it."""
        if name not in self._loaded:
            raise ConfigError(f"There is no adapter {name!r}; loaded: {self._known()}.")
        self._retired.append(self._loaded.pop(name))

    def _free_slots(self) -> None:
        used = set(self._in_use())
        for adapter in [adapter for adapter in self._retired if adapter not in used]:
            self._retired.remove(adapter)
            self.slots.free(adapter.slot)
            if self._mirror is not None:
                self._mirror.free_adapter(adapter.slot)

    def _known(self) -> str:
        return ", ".join(repr(own) for own in self._loaded) or "none"

    def get(self, name: str | None) -> Adapter | None:
        """None: the model as it is."""
        if name is None:
            return None
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            raise RequestError(f"There is no adapter {name!r}; loaded: {self._known()}.", "adapter")
        return found
