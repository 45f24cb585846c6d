"""GraphMemory: what a device has no memory for, and what is done instead. The one place that knows of such a lack,
besides the loop, which makes steps smaller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

log = logging.getLogger("paceline.engine")
T = TypeVar("T")


class Use(Enum):
    """What takes memory beside weights and cache: what it is, and what happens without it."""

    DECODE = "to capture repeated steps", "tokens are decoded one step at a time from now on"
    LOOKUP = "to capture wide steps with drafts", "fewer tokens are drafted at a time from now on"
    PREFILL = "to capture steps", "steps are launched kernel by kernel from now on"
    VERIFY = "to capture steps with drafts", "they are launched kernel by kernel from now on"
    DRAFT = "to capture what draft models run", "it is launched kernel by kernel from now on"
    DRAFT_SAMPLES = "to capture what draft models sample", "the host samples it from now on"
    CONTROLS = "on the device for penalties, bias and masks", "tokens of requests with some are sampled by the host"


class GraphMemory:
    """Shared by all that is captured for one engine."""

    def __init__(self) -> None:
        self._lacking: set[Use] = set()
        self._told: set[Use] = set()
        self._holders: list[tuple[Use, WeakMethod[Callable[[], Any]]]] = []

    def held(self, use: Use, release: Callable[[], None]) -> None:
        """`release`, a method, lets go of all that was captured for a use: called when that is given up. Its owner is
        not kept alive by it."""
        self._holders = [one for one in self._holders if one[1]() is not None]
        self._holders.append((use, WeakMethod(release)))

    def lacks(self, use: Use) -> bool:
        """Whether it was given up."""
        return use in self._lacking

    def attempt(self, use: Use, make: Callable[[], T], final: bool = True) -> T | None:
        """What `make` makes; None: there is no memory for it. It is then given up for good, if this attempt is
        `final`. `make` must leave nothing half done."""
        made: list[T] = []
        return made[0] if self.allows(use, lambda: made.append(make()), final) else None

    def allows(self, use: Use, do: Callable[[], object], final: bool = True) -> bool:
        """The same for what is done without a result; False: there is no memory for it."""
        if use in self._lacking:
            return False
        try:
            do()
        except torch.OutOfMemoryError:
            pass
        else:
            return True
        # Not in the handler: what was allocated before memory ended lives as long as the exception.
        if final:
            self.give_up(use)
        return False

    def give_up(self, use: Use) -> None:
        """For good: what was captured for it is never replayed again, and others need the memory."""
        self._lacking.add(use)
        self.warn(use)
        for held, release in self._holders:
            call = release() if held is use else None
            if call is not None:
                call()
        torch.cuda.empty_cache()

    def warn(self, use: Use) -> None:
        """Once each."""
        if use not in self._told:
            what, instead = use.value
            log.warning("no memory %s: %s, which is slower; give the cache fewer kv_blocks", what, instead)
        self._told.add(use)
