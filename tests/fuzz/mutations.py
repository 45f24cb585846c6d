"""Small changes that make a valid file hostile, the same for the same seed: of its bytes, and of what they say."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from dataclasses import dataclass, field
from typing import Any

NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, *NUMBERS, 10 ** 30, 10 ** 400, 0.0, 0.5, -1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf, "",
    "x", "8", "true", "\ud800", "é" * 300, "a/../../b", "(a+)+$", "{{ 9 ** 9999 }}", [], [0], [[]], ["x", 1, None],
    [1] * 50, {}, {"x": 1}, {"content": 5})


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, put in or doubled, or a number in their place."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1) if rng.random() < 0.5 else rng.randrange(min(len(found), 512) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = struct.pack("<Q", rng.choice(NUMBERS) & (1 << 64) - 1)[:rng.choice((1, 4, 8))]
            found[at:at + len(number)] = number
        elif kind == 2:
            del found[at:at + rng.choice((1, 4, 8, 64))]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        elif kind == 4:
            found[at:at] = found[at:at + rng.choice((8, 64, 512))]
        else:
            del found[at:]
    return bytes(found)


def of_value(value: Any, rng: random.Random) -> Any:
    """A JSON value with some of its parts replaced, left out, doubled or nested."""
    found = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(found)
        if not places:
            return copy.deepcopy(rng.choice(VALUES))
        owner, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind < 5:
            owner[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 5:
            del owner[key]
        elif kind == 6:
            other, name = rng.choice(places)
            try:
                owner[key] = copy.deepcopy(other[name])
            except (KeyError, IndexError):  # it was left out
                continue
        else:
            for _ in range(rng.choice((1, 3, 150))):
                owner[key] = [owner[key]] if rng.random() < 0.5 else {"x": owner[key]}
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Where something stands: objects and lists with their keys, rather shallow ones than any of a long list."""
    places, level = [], [value]
    while level and len(places) < 400:
        below = []
        for one in level:
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))[:8] if isinstance(one, list) else []
            places += [(one, key) for key in keys]
            below += [one[key] for key in keys]
        level = below
    return places


def of_json(text: str, rng: random.Random) -> str:
    """A JSON text: mostly its values changed, else its bytes; now and then nested without end."""
    if rng.random() < 0.03:
        return rng.choice(("[", '{"x":')) * 100_000
    if rng.random() < 0.2:
        return of_bytes(text.encode(), rng).decode("utf-8", "replace")
    return json.dumps(of_value(json.loads(text), rng))


def of_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Mostly the header, whose length may then be a lie."""
    if rng.random() < 0.3:
        return of_bytes(data, rng)
    size = struct.unpack_from("<Q", data)[0]
    header = of_json(data[8:8 + size].decode(), rng).encode("utf-8", "replace")
    claimed = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) & (1 << 64) - 1
    return struct.pack("<Q", claimed) + header + data[8 + size:]


# -- GGUF ------------------------------------------------------------------------------------------------------------

_FORMATS = "BbHhIif?s_QqdB"
"""Of the value types 0 to 12, by struct's letters; 8 is a text, 9 an array."""


@dataclass
class GGUF:
    """A file taken apart: metadata [key, type, value], an array's value [type of items, count, items]; tensors [name,
    dimensions, type, offset]."""

    metadata: list[list[Any]]
    tensors: list[list[Any]]
    data: bytes
    counts: list[int] = field(default_factory=list)
    """Of tensors and keys, where they are to be lies."""

    def encoded(self) -> bytes:
        tensors, keys = self.counts or (len(self.tensors), len(self.metadata))
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys))
        for key, kind, value in self.metadata:
            out += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return bytes(out) + bytes(-len(out) % 32) + self.data


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _text(value if isinstance(value, str) else "x")
    if kind == 9 and isinstance(value, list):
        item, count, items = value
        return struct.pack("<IQ", item, count) + b"".join(_value(item, one) for one in items)
    if kind > 12 or kind == 9:
        return bytes(12)
    letter = _FORMATS[kind]
    number = value if isinstance(value, int | float) else 1
    if letter in "fd":
        return struct.pack("<" + letter, float(number) if abs(number) < 1e38 or number != number else math.inf)
    size = struct.calcsize("<" + letter)
    whole = int(number) if math.isfinite(number) else 0
    return (whole & (1 << 8 * size) - 1).to_bytes(size, "little")


def taken_apart(metadata: dict[str, Any], tensors: list[tuple[str, tuple[int, ...], int, bytes]]) -> GGUF:
    """From plain values; of tensors their names, shapes in torch order, types and bytes."""
    found, data = [], b""
    for key, value in metadata.items():
        kind = 7 if isinstance(value, bool) else 4 if isinstance(value, int) else 6 if isinstance(value, float) else 8
        if isinstance(value, list):
            item = 8 if isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5
            found.append([key, 9, [item, len(value), value]])
        else:
            found.append([key, kind, value])
    infos = []
    for name, shape, code, raw in tensors:
        infos.append([name, list(reversed(shape)), code, len(data)])
        data += raw + bytes(-len(raw) % 32)
    return GGUF(found, infos, data)


def of_gguf(valid: GGUF, rng: random.Random) -> bytes:
    """Keys with other values and types, tensors with other shapes, places and names, counts that are lies; or bytes."""
    if rng.random() < 0.3:
        return of_bytes(valid.encoded(), rng)
    file = copy.deepcopy(valid)
    for _ in range(rng.choice((1, 1, 2, 3))):
        entry, tensor = rng.choice(file.metadata), rng.choice(file.tensors)
        kind = rng.randrange(10)
        if kind < 2:
            entry[1], entry[2] = rng.choice((0, 3, 4, 5, 10, 11, 7)), rng.choice(NUMBERS)
        elif kind == 2:
            entry[1], entry[2] = rng.choice((6, 12)), rng.choice((0.0, -1.0, math.nan, math.inf, 1e-30, 1e30))
        elif kind == 3:
            entry[1], entry[2] = 8, rng.choice(("", "x", "none", "llama", "\0", "é" * 2000, "{{ 'x' * 999999999 }}"))
        elif kind == 4:
            items = rng.choice(([], [1, 2], ["x", "y"], [0.5] * 9))
            item = 8 if items and isinstance(items[0], str) else rng.choice((4, 5, 6, 7, 9, 99))
            entry[1], entry[2] = 9, [item, rng.choice((len(items), *NUMBERS)) & (1 << 64) - 1, items]
        elif kind == 5:
            if rng.random() < 0.5:
                file.metadata.remove(entry)
            elif entry[1] == 9 and entry[2][2]:
                items = entry[2][2] = list(entry[2][2])
                items[rng.randrange(len(items))] = rng.choice((*NUMBERS, "", "a b", "é" * 1500))
        elif kind < 8:
            dims = tensor[1]
            dims[rng.randrange(len(dims))] = rng.choice(NUMBERS) & (1 << 64) - 1
            if rng.random() < 0.3:
                dims.append(rng.choice(NUMBERS) & (1 << 64) - 1)
        elif kind == 8:
            tensor[rng.choice((2, 3))] = rng.choice((0, 1, 2, 8, 12, 30, 32, 64, 99, 1 << 20))
        else:
            tensor[0] = rng.choice((rng.choice(file.tensors)[0], "blk.0.ffn_gate_exps.weight", "output.weight", "",
                                    "blk.99999999.attn_q.weight"))
    if rng.random() < 0.1:
        file.counts = [rng.choice(NUMBERS) & (1 << 64) - 1 for _ in range(2)]
    return file.encoded()


# -- templates ---------------------------------------------------------------------------------------------------------

_EXPRESSIONS = (
    "messages", "x", "ns.x", "1", "99999", "'ab'", "[1]", "none", "E + E", "E * E", "E ~ E", "E ** E", "E % E", "E - E",
    "[E, E]", "(E, E)", "{'a': E, 'b': E}", "dict(a=E, b=E)", "range(E)", "E | list", "E | string", "E | join(E)",
    "E | tojson(indent=E)", "E | center(E)", "E | indent(E)", "E | replace(E, E)", "E | batch(E, E) | list",
    "E | map('string') | list", "E | sum(start=E)", "E | sort", "E | length", "E | round(E)", "E | format(E)",
    "E.replace('', E)", "E.join(E)", "E.center(E)", "'{0}{0:>99999999}'.format(E)", "E[0]", "E[E]", "E.content", "m(E)",
    "E if E else E", "E == E", "E in E", "namespace(x=E)", "E | unique | list", "E | groupby(E)", "loop.index",
    "cycler(E)", "E | default(E)", "E | int", "E | float", "E.items()", "E | dictsort", "E | slice(E) | list",
    "E | trim | title")
_STATEMENTS = (
    "{{ E }}", "{% set x = E %}", "{% set ns.x = E %}", "{% set x %}S{% endset %}", "{% if E %}S{% endif %}",
    "{% for x in E %}S{% endfor %}", "{% for x in E if E %}S{% endfor %}",
    "{% for x in E recursive %}{{ loop(E) }}{% endfor %}",
    "{% macro m(x) %}S{% endmacro %}", "text", "S S", "{% filter upper %}S{% endfilter %}",
    "{% call m(E) %}S{% endcall %}",
    "{% for i in range(99) %}{% set ns.x = E %}{% endfor %}")


def template(rng: random.Random) -> str:
    """One that Jinja mostly understands, grown from what templates are made of."""
    found = "{% set ns = namespace(x=1) %}{% set x = 'ab' %}{% macro m(x) %}{{ x }}{% endmacro %}S S S"
    for _ in range(rng.choice((6, 12, 24))):
        at = [place for place, letter in enumerate(found) if letter in "ES"]
        if not at:
            break
        place = rng.choice(at)
        found = found[:place] + rng.choice(_EXPRESSIONS if found[place] == "E" else _STATEMENTS) + found[place + 1:]
    return found.replace("E", "x").replace("S", "")
