"""Drafters that others wrote, found by the names that their packages registered, or as "module:builder"."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.options import FILE_OPTIONS, Options

log = logging.getLogger("paceline.speculation")

GROUP = "paceline.drafters"
"""Of entry points: a package says `name = "module:builder"` there, and `name` is a method."""
Builder = Callable[[str, Options, DraftContext], Drafter]
_PLACE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@cache
def registered() -> Mapping[str, EntryPoint]:
    """By name; what is installed while the process runs is not looked for."""
    return MappingProxyType({one.name: one for one in entry_points(group=GROUP)})


def is_place(method: str) -> bool:
    """Whether it reads "module:builder". Nothing is imported."""
    return _PLACE.fullmatch(method) is not None


def places_named(wish: Any) -> Iterator[str]:
    """Every "module:builder" in a wish and in those within it: code that would be run. Ask before a stranger's wish is
    met."""
    if isinstance(wish, str):
        if is_place(wish):
            yield wish
    elif isinstance(wish, Mapping):
        for name, value in wish.items():
            if name not in FILE_OPTIONS:  # a model may be called "name:QUANT"
                yield from places_named(value)
    elif isinstance(wish, list | tuple):
        for one in wish:
            yield from places_named(one)


def load(method: str) -> Builder:
    """The builder that a registered name, or a place, stands for."""
    try:
        if method in registered():
            found = registered()[method].load()
        else:
            module, _, name = method.partition(":")
            found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as problem:  # the latter: of a script, which is no module to import
        log.warning("the drafter %s cannot be loaded", method, exc_info=problem)
        raise RequestError(f"The drafter {method!r} cannot be loaded ({type(problem).__name__}: {problem}): install "
                           "its package, or put its folder on PYTHONPATH.", "speculation") from problem
    if not callable(found):
        raise RequestError(f"The drafter {method!r} is no builder: name a function of (method, options, context).",
                           "speculation")
    return found  # type: ignore[no-any-return]
