"""Jinja templates in a sandbox that ends: with so many steps, so much computing and so much text.

Templates come with models, and run in the server's own threads, where nothing can stop them from outside. So whatever
repeats (loops, calls, filters, tests) counts its steps, and whatever makes something large out of something small
(operators, methods, filters, lists in lists) is asked how large it will be before it is made.
"""

from __future__ import annotations

import functools
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_LEVELS = 200
"""Of lists in lists. Some of Python's own functions follow them as deep as they go."""
_MOST_BITS = 1 << 16
_SIZED = ("center", "ljust", "rjust", "zfill", "to_bytes")
"""Methods that make as much as a number says."""
_DROPPED = ("urlize", "wordwrap", "pprint", "striptags", "xmlattr")
"""Filters for pages on the web. No prompt needs them, and how long they take cannot be said beforehand."""
_WIDTH = re.compile(r"\d+")


class LimitError(jinja2.TemplateRuntimeError):
    """A template would go on for too long, or make too much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one rendering."""

    seconds: float = 5.0
    """Of computing: who shares a busy machine is not to blame."""
    steps: int = 2_000_000
    """Iterations of loops, calls, filters and tests."""
    characters: int = 1 << 24
    """Of the text, and of any value on the way to it."""


class Spent:
    """What one rendering has used."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._until = time.thread_time() + limits.seconds
        self._steps = 0
        self._made = 0

    def step(self) -> bool:
        """Always true."""
        self._steps += 1
        if self._steps > self.limits.steps:
            raise LimitError(f"it takes more than {self.limits.steps:,} steps")
        if not self._steps % 16:
            self.check_time()
        return True

    def check_time(self) -> None:
        if time.thread_time() > self._until:
            raise LimitError(f"it computes for more than {self.limits.seconds:g} seconds")

    def room(self, size: int) -> None:
        """Whether something of this size may be made."""
        if size > self.limits.characters:
            raise LimitError(f"it makes more than {self.limits.characters:,} characters")

    def made(self, value: Any) -> Any:
        """`value`, once it has been weighed."""
        size = len(value) if isinstance(value, str) else self.weight(value)
        self.room(size)
        self._made += size
        if self._made > 64 * self.limits.characters:
            raise LimitError(f"it makes more than {64 * self.limits.characters:,} characters on the way")
        return value

    def weight(self, value: Any) -> int:
        """Characters and items, of all that lies within too: what is there twice counts twice, as where it is written
        out."""
        if isinstance(value, str | bytes):
            self.room(len(value))
            return len(value)
        size, level, depth = 1, [value], 0
        while level:
            below: list[Any] = []
            for one in level:
                if isinstance(one, str | bytes):
                    size += len(one)
                elif isinstance(one, list | tuple | set | frozenset):
                    below += one
                elif isinstance(one, Mapping):
                    below += one.keys()
                    below += one.values()
                elif isinstance(one, Namespace):
                    if depth:  # what was weighed would not stay as it was
                        raise LimitError("it keeps a namespace within another value")
                    below += object.__getattribute__(one, "__dict__").values()
            size, level, depth = size + len(below), below, depth + 1
            self.room(size)
            if depth > MOST_LEVELS:
                raise LimitError(f"it nests values more than {MOST_LEVELS} levels deep")
            if size > 10_000:
                self.check_time()
        return size


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates are compiled and rendered within `spending`, each thread by itself."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._shown, **options)
        self._local = threading.local()
        self.globals.pop("lipsum", None)
        for name in _DROPPED:
            self.filters.pop(name, None)

    def bound(self) -> None:
        """Once all filters and tests are there."""
        self.filters.update({name: self._filter(name, one) for name, one in self.filters.items()})
        self.tests.update({name: self._filter(name, one) for name, one in self.tests.items()})
        for one in (self.tick, self.held, self.kept, self.joined):  # under names that no template can write
            self.filters[f"({one.__name__})"] = one

    def compiled(self, source: str) -> jinja2.Template:
        return self.from_string(_Counted().visit(self.parse(source)))

    @contextmanager
    def spending(self, limits: Limits) -> Iterator[None]:
        self._local.spent = Spent(limits)
        try:
            yield
        finally:
            del self._local.spent

    @property
    def spent(self) -> Spent:
        found: Spent = self._local.spent
        return found

    # -- what compiled templates call ----------------------------------------------------------------------------------

    @jinja2.pass_context  # what takes it is not computed beforehand
    def tick(self, context: Any, value: bool) -> bool:
        """At the beginning of what a loop repeats, or asks of an item."""
        return self.spent.step()

    @jinja2.pass_context
    def held(self, context: Any, value: Any) -> Any:
        """A list."""
        return self.spent.made(value)

    @jinja2.pass_context
    def kept(self, context: Any, value: Any) -> Any:
        """By a namespace."""
        self.spent.weight([value])
        return value

    def _shown(self, value: Any) -> Any:
        """What is written out, before it becomes a text."""
        if not isinstance(value, str):
            self.spent.weight(value)
        return value

    @jinja2.pass_context
    def joined(self, context: Any, *parts: Any) -> str:
        self.spent.room(sum(map(self.spent.weight, parts)))
        return str(self.spent.made("".join(map(str, parts))))

    def concat(self, pieces: Iterable[str]) -> str:  # jinja2 has a function there
        size, found = 0, []
        for piece in pieces:
            size += len(piece)
            self.spent.room(size)
            found.append(piece)
        return "".join(found)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spent = __self.spent
        spent.step()
        args = _checked_method(spent, __obj, args, kwargs)
        return spent.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spent = self.spent
        spent.step()
        if operator == "+" and type(left) is str and type(right) is str:  # what templates do most
            spent.room(len(left) + len(right))
            return spent.made(left + right)
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int) and isinstance(one, str | bytes | list | tuple):
                    spent.room(spent.weight(one) * max(0, other))
        elif operator == "+":
            spent.room(spent.weight(left) + spent.weight(right))
        elif operator == "%" and isinstance(left, str):
            _check_percent(spent, left, right)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise LimitError("it makes a number that is too long")
        return spent.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        """str.format and str.format_map."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            spent, parts = self.spent, string.Formatter().parse(value.__self__)
            fields = [part for part in parts if part[1] is not None]
            if any("{" in (spec or "") for _, _, spec, _ in fields):
                raise LimitError("it has a format within a format")
            widths = sum(int(width[:20]) for _, _, spec, _ in fields for width in _WIDTH.findall(spec or ""))
            spent.room(len(value.__self__) + widths + len(fields) * (spent.weight(args) + spent.weight(kwargs)))
            return wrapped(*args, **kwargs)

        return bounded

    def _filter(self, name: str, one: Any) -> Callable[..., Any]:
        """A filter or a test that counts as a step, and is asked for its size."""
        first = 1 if hasattr(one, "jinja_pass_arg") else 0

        @functools.wraps(one)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            spent = self.spent
            spent.step()
            given = list(args)
            if len(given) > first and isinstance(given[first], Namespace):
                spent.weight(given[first])
            if len(given) > first and name in _FILTERS:
                if name in ("join", "sum"):
                    given[first] = list(given[first])
                _FILTERS[name](spent, given[first], [*given[first + 1:], *kwargs.values()])
            return spent.made(one(*given, **kwargs))

        return bounded


class _Counted(NodeTransformer):
    """Has loops count, and what is put into lists and namespaces weighed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("tick"), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _call("kept", node.node)
        return node

    def visit_List(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        variable = getattr(node, "ctx", "load") == "load" and next(node.find_all(_VARIABLE), None) is not None
        return _call("held", node) if variable else node

    visit_Tuple = visit_Dict = visit_List


_VARIABLE = (nodes.Name, nodes.Call, nodes.Filter)


def _call(name: str, *args: Any) -> nodes.Filter:
    """One of the environment's own methods; as a filter, which costs least."""
    value = args[0] if args else nodes.Const(True, lineno=1)
    return nodes.Filter(value, f"({name})", list(args[1:]), [], None, None, lineno=value.lineno)


# -- how large it will be ----------------------------------------------------------------------------------------------

def _checked_method(spent: Spent, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments to call it with: what can be read once only has been read."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if name in _SIZED:
        _sized(spent, owner, [*args, *kwargs.values()])
    if not isinstance(owner, str | bytes) or not args:
        return args
    if name == "replace":
        _replaced(spent, owner, list(args))
    elif name == "expandtabs":
        spent.room(len(owner) * max(1, _largest([*args, *kwargs.values()])))
    elif name == "translate":
        spent.room(len(owner) * spent.weight(args[0]))
    elif name == "join":
        items = list(args[0])
        _joined(spent, items, [owner])
        return (items, *args[1:])
    return args


def _largest(values: list[Any]) -> int:
    return max((one for one in values if isinstance(one, int)), default=0)


def _sized(spent: Spent, value: Any, rest: list[Any]) -> None:
    spent.room(_largest(rest))


def _replaced(spent: Spent, value: Any, rest: list[Any]) -> None:
    texts = [one for one in rest if isinstance(one, str | bytes)]
    if isinstance(value, str | bytes) and len(texts) > 1 and type(value) is type(texts[0]):
        spent.room(len(value) + value.count(texts[0]) * len(texts[1]))  # type: ignore[arg-type]
    else:
        spent.room(spent.weight(value) * max(1, spent.weight(rest)))


def _joined(spent: Spent, value: list[Any], rest: list[Any]) -> None:
    spent.room(spent.weight(value) + len(value) * spent.weight(rest))


def _indented(spent: Spent, value: Any, rest: list[Any]) -> None:
    lines, widths = len(str(value).splitlines()) + 1, [len(one) for one in rest if isinstance(one, str)]
    spent.room(spent.weight(value) + lines * max(_largest(rest), 4, *widths))


def _filled(spent: Spent, value: Any, rest: list[Any]) -> None:
    spent.room(_largest(rest) * spent.weight(rest))


def _added(spent: Spent, value: list[Any], rest: list[Any]) -> None:
    if any(isinstance(one, str | list | tuple) for one in value):
        spent.room(len(value) * spent.weight(value) // 64)  # every addition copies what there is


def _rounded(spent: Spent, value: Any, rest: list[Any]) -> None:
    if abs(_largest(rest)) > 1000:
        raise LimitError("it rounds to more digits than there are")


def _formatted(spent: Spent, value: Any, rest: list[Any]) -> None:
    _check_percent(spent, str(value), rest)


def _check_percent(spent: Spent, pattern: str, values: Any) -> None:
    if "*" in pattern:
        raise LimitError("it has a format whose width is a value")
    widths = sum(int(width[:20]) for width in _WIDTH.findall(pattern)) if "%" in pattern else 0
    spent.room(len(pattern) + widths + pattern.count("%") * spent.weight(values))


_FILTERS: dict[str, Callable[[Spent, Any, list[Any]], None]] = {
    "center": _sized, "replace": _replaced, "join": _joined, "indent": _indented, "batch": _filled, "slice": _filled,
    "sum": _added, "round": _rounded, "format": _formatted,
}
