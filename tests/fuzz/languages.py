"""Random languages, written down for the engine (as a regex or a JSON schema) and for this file alone: by derivatives,
byte by byte, it is known which texts belong to one and which may still become one that does."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Language:
    """Nothing, the empty text, one byte of some, one after the other, one or the other, or up to so many times one."""

    kind: str
    bytes: frozenset[int] = frozenset()
    parts: tuple[Language, ...] = ()
    least: int = 0
    most: int | None = None

    @functools.cached_property
    def empty(self) -> bool:
        """Whether the empty text belongs to it."""
        match self.kind:
            case "empty":
                return True
            case "then":
                return all(part.empty for part in self.parts)
            case "or":
                return any(part.empty for part in self.parts)
            case "times":
                return self.least == 0 or self.parts[0].empty
        return False

    def after(self, byte: int) -> Language:
        """What may follow the byte; NOTHING: it may not come."""
        return _after(self, byte)

    def first(self) -> frozenset[int]:
        """Bytes that may come next."""
        match self.kind:
            case "byte":
                return self.bytes
            case "then":
                found: frozenset[int] = frozenset()
                for part in self.parts:
                    found |= part.first()
                    if not part.empty:
                        break
                return found
            case "or" | "times":
                return frozenset().union(*(part.first() for part in self.parts))
        return frozenset()

    def spelled(self, text: bytes) -> Language:
        language = self
        for byte in text:
            language = language.after(byte)
        return language


NOTHING, EMPTY = Language("nothing"), Language("empty")


@functools.lru_cache(maxsize=1 << 16)
def _after(language: Language, byte: int) -> Language:
    match language.kind:
        case "byte":
            return EMPTY if byte in language.bytes else NOTHING
        case "then":
            head, rest = language.parts[0], then(language.parts[1:])
            found = then([head.after(byte), rest])
            return either([found, rest.after(byte)]) if head.empty else found
        case "or":
            return either(part.after(byte) for part in language.parts)
        case "times":
            part, most = language.parts[0], language.most
            left = times(part, max(0, language.least - 1), None if most is None else most - 1)
            return then([part.after(byte), left])
    return NOTHING


def then(parts: Iterable[Language]) -> Language:
    flat: list[Language] = []
    for part in parts:
        if part is NOTHING or part.kind == "nothing":
            return NOTHING
        flat += part.parts if part.kind == "then" else [part] if part.kind != "empty" else []
    return EMPTY if not flat else flat[0] if len(flat) == 1 else Language("then", parts=tuple(flat))


def either(parts: Iterable[Language]) -> Language:
    flat: dict[Language, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part.parts if part.kind == "or" else [part] if part.kind != "nothing" else [])
    return NOTHING if not flat else next(iter(flat)) if len(flat) == 1 else Language("or", parts=tuple(flat))


def times(part: Language, least: int, most: int | None) -> Language:
    return EMPTY if most == 0 else Language("times", parts=(part,), least=least, most=most)


def spells(text: str) -> Language:
    return then(Language("byte", frozenset([byte])) for byte in text.encode())


# ---------------------------------------------------------------- drawn by seed

CLASSES = {"[ab]": "ab", "[a-e]": "abcde", "[0-9]": "0123456789", "[01]": "01", "[xyz_]": "xyz_", "\\d": None}
WORDS = ("a", "ab", "true", "null", "é", "x ", ", ", "12", "name", "yes")


def regex(luck: random.Random, depth: int = 3) -> tuple[str, Language]:
    """An expression that Python reads too, and its language."""
    choice = luck.random()
    if depth == 0 or choice < 0.25:
        if luck.random() < 0.5:
            text = luck.choice([name for name, members in CLASSES.items() if members is not None])
            return text, Language("byte", frozenset(CLASSES[text].encode()))  # type: ignore[union-attr]
        word = luck.choice(WORDS)
        return word, spells(word)
    if choice < 0.55:
        parts = [regex(luck, depth - 1) for _ in range(luck.randint(2, 3))]
        return "".join(text for text, _ in parts), then(language for _, language in parts)
    if choice < 0.75:
        parts = [regex(luck, depth - 1) for _ in range(luck.randint(2, 3))]
        return f"({'|'.join(text for text, _ in parts)})", either(language for _, language in parts)
    text, language = regex(luck, depth - 1)
    least = luck.randint(0, 2)
    most = luck.choice([None, least + luck.randint(0, 3)])
    most = 1 if most == 0 else most
    return f"({text}){{{least},{'' if most is None else most}}}", times(language, least, most)


def schema(luck: random.Random, depth: int = 2) -> tuple[Any, Language]:
    """A JSON schema of which all texts are known, written without spaces, and their language."""
    kind = luck.choice(["boolean", "null", "enum", "pattern"] + ["array", "object", "either"] * (depth > 0))
    if kind == "boolean":
        return {"type": "boolean"}, either([spells("true"), spells("false")])
    if kind == "null":
        return {"type": "null"}, spells("null")
    if kind == "enum":
        values = luck.sample([1, 12, "yes", "no", "é", None, True, "a b"], luck.randint(1, 4))
        return {"enum": values}, either(spells(json.dumps(value, ensure_ascii=False)) for value in values)
    if kind == "pattern":
        least = luck.randint(1, 2)
        most = least + luck.randint(0, 2)
        inner = times(Language("byte", frozenset(b"abcde")), least, most)
        return {"type": "string", "pattern": f"^[a-e]{{{least},{most}}}$"}, then([spells('"'), inner, spells('"')])
    if kind == "array":
        items, language = schema(luck, depth - 1)
        least = luck.randint(0, 2)
        most = max(1, least + luck.randint(0, 2))
        further = then([spells(","), language])
        inside = then([language, times(further, max(0, least - 1), most - 1)])
        listed = inside if least else either([EMPTY, inside])
        return ({"type": "array", "items": items, "minItems": least, "maxItems": most},
                then([spells("["), listed, spells("]")]))
    if kind == "either":
        parts = [schema(luck, depth - 1) for _ in range(2)]
        return {"anyOf": [one for one, _ in parts]}, either(language for _, language in parts)
    names = luck.sample(["name", "a", "b", "an", "yes"], luck.randint(1, 3))
    fields = [(name, *schema(luck, depth - 1)) for name in names]
    pairs = [then([spells(f'"{name}":'), language]) for name, _, language in fields]
    inside = then([pairs[0], *(then([spells(","), pair]) for pair in pairs[1:])])
    return ({"type": "object", "properties": {name: one for name, one, _ in fields}, "required": names,
             "additionalProperties": False}, then([spells("{"), inside, spells("}")]))
