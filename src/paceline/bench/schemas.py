"""JSON schemas of many kinds, for measuring and testing structured output. Strings and
arrays are bounded, so that most texts they allow have an end (OPEN_ENDED: all but these)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def thing(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties, all of them required unless said otherwise, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required,
            "additionalProperties": False, **more}


def row(items: Any, most: int = 4, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_BASIC: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": whole(0, 100),
    "integer_negative": whole(-50, -10),
    "integer_wide": whole(-1_000_000, 1_000_000),
    "integer_exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "number_signed": {"type": "number", "minimum": -2.5, "maximum": 2.5},
    "number_exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 200, "multipleOf": 5},
    "string": text(20),
    "string_lengths": text(8, minLength=3),
    "type_list": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99},
    "const": {"const": "paceline"},
    "const_object": {"const": {"kind": "fixed", "n": [1, 2, 3]}},
    "enum_strings": {"enum": ["red", "green", "blue", "dark green"]},
    "enum_mixed": {"enum": ["one", 2, None, True, [3], {"four": 4}]},
    "enum_unicode": {"enum": ["Grüße", "naïve", "日本", "😀", "Ωmega"]},
}

_STRINGS: dict[str, Schema] = {
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "pattern_alternatives": {"type": "string", "pattern": "^(cat|dog|(mo){1,3}use)s?$"},
    "pattern_unicode": {"type": "string", "pattern": "^[äöüß]{1,5}$"},
    "pattern_escapes": {"type": "string", "pattern": r"^\d{2}\\[a-f]{2}\"$"},
    "date": {"type": "string", "format": "date", "pattern": "-(0[1-9]|1[0-9]|2[0-8])$"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org|net)$"},
    "unicode_keys": thing({"Straße": text(6), "名前": text(6), "emoji 😀": {"type": "boolean"}}),
    "escaped_keys": thing({'quo"te': whole(0, 9), "back\\slash": whole(0, 9), "new\nline": whole(0, 9)}),
}

_OBJECTS: dict[str, Schema] = {
    "person": thing({"name": text(), "age": whole(0, 120)}),
    "optional": thing({"a": whole(0, 9), "b": whole(0, 9), "c": whole(0, 9)}, required=["b"]),
    "all_optional": thing({"x": {"type": "boolean"}, "y": {"type": "null"}}, required=[]),
    "empty_object": thing({}),
    "map": {"type": "object", "patternProperties": {"^[a-z]{1,6}$": whole(0, 99)}, "additionalProperties": False,
            "minProperties": 1, "maxProperties": 3},
    "pattern_properties": {"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": {"type": "boolean"}},
                           "additionalProperties": False, "maxProperties": 2},
    "nested": thing({"a": thing({"b": thing({"c": thing({"d": whole(0, 9)})})})}),
    "address": thing({"street": text(16), "city": text(10), "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                      "country": {"enum": ["DE", "FR", "IT"]}}),
    "extra_allowed": {"type": "object", "properties": {"id": whole(1, 9)}, "required": ["id"],
                      "patternProperties": {"^x[a-z]{0,5}$": {"type": "boolean"}}, "additionalProperties": False,
                      "maxProperties": 3},
    "many_fields": thing({f"field_{n}": whole(0, 9) if n % 2 else text(5) for n in range(14)}),
    "titles": thing({"title": text(), "tags": row(text(6), 3), "draft": {"type": "boolean"}}, title="Article",
                    description="An article.", examples=[{}]),
}

_ARRAYS: dict[str, Schema] = {
    "integers": row(whole(0, 9), 6),
    "strings": row(text(5), 4, least=2),
    "matrix": row(row(whole(0, 9), 3, least=3), 3, least=2),
    "tuple": {"type": "array", "prefixItems": [whole(0, 9), text(4), {"type": "boolean"}], "items": False,
              "minItems": 3},
    "tuple_open": {"type": "array", "prefixItems": [{"const": "head"}], "items": whole(0, 9), "minItems": 1,
                   "maxItems": 4},
    "empty_array": row(whole(0, 1), 0),
    "objects": row(thing({"id": whole(1, 999), "ok": {"type": "boolean"}}), 3, least=1),
    "contact_list": row(thing({"name": text(8), "phones": row({"type": "string", "pattern": "^\\+[0-9]{6,9}$"}, 2)}), 2,
                        least=1),
    "enum_array": row({"enum": ["low", "mid", "high"]}, 5, least=1),
}

_CHOICES: dict[str, Schema] = {
    "any_of": {"anyOf": [whole(0, 9), {"type": "boolean"}, thing({"v": {"type": "null"}})]},
    "any_of_objects": {"anyOf": [thing({"kind": {"const": "circle"}, "radius": whole(1, 9)}),
                                 thing({"kind": {"const": "square"}, "side": whole(1, 9)})]},
    "one_of_disjoint": {"oneOf": [thing({"type": {"const": "a"}, "a": whole(0, 9)}),
                                  thing({"type": {"const": "b"}, "b": text(5)})]},
    "one_of_types": {"oneOf": [{"type": "boolean"}, {"type": "null"}, row(whole(0, 9), 2)]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    "all_of_objects": {"allOf": [{"type": "object", "properties": {"a": whole(0, 9)}, "required": ["a"]},
                                 {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
                       "properties": {"a": True, "b": True}, "additionalProperties": False},
    "nullable": thing({"value": {"anyOf": [text(6), {"type": "null"}]}}),
    "any_of_nested": thing({"item": {"anyOf": [row({"anyOf": [whole(0, 9), {"type": "boolean"}]}, 3),
                                               thing({"only": whole(0, 9)})]}}),
}

_REFERENCES: dict[str, Schema] = {
    "ref": {"$defs": {"point": thing({"x": whole(-9, 9), "y": whole(-9, 9)})},
            **thing({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}})},
    "ref_chain": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"type": "boolean"}},
                  **row({"$ref": "#/$defs/a"}, 3)},
    "ref_definitions": {"definitions": {"name": text(6)}, **thing({"first": {"$ref": "#/definitions/name"},
                                                                  "last": {"$ref": "#/definitions/name"}})},
    "ref_recursive": {"$defs": {"node": thing({"value": whole(0, 9), "next": {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})}, "$ref": "#/$defs/node"},
    "ref_tree": {"$defs": {"leaf": thing({"name": {"const": "leaf"}}),
                           "twig": thing({"name": {"const": "twig"}, "leaves": row({"$ref": "#/$defs/leaf"}, 2)})},
                 **thing({"name": {"const": "tree"}, "twigs": row({"$ref": "#/$defs/twig"}, 2, least=1)})},
}

_CALLS: dict[str, Schema] = {
    "tool_call": thing({"name": {"const": "get_weather"},
                        "arguments": thing({"city": text(10), "unit": {"enum": ["celsius", "fahrenheit"]}})}),
    "tool_choice": {"anyOf": [
        thing({"name": {"const": "search"}, "arguments": thing({"query": text(14), "limit": whole(1, 20)})}),
        thing({"name": {"const": "open"}, "arguments": thing({"page": whole(1, 99)})})]},
    "config": thing({"version": {"const": 2}, "debug": {"type": "boolean"}, "level": {"enum": ["info", "warn"]},
                     "limits": thing({"cpu": whole(1, 64),
                                      "memory": {"type": "string", "pattern": "^[0-9]{1,4}(Mi|Gi)$"}}),
                     "hosts": row(text(8), 2)}),
    "reasoning": thing({"steps": row(thing({"explanation": text(20), "output": text(8)}), 2, least=1),
                        "final_answer": text(8)}),
    "geo": thing({"type": {"const": "Point"}, "coordinates": {"type": "array", "prefixItems": [
        {"type": "number", "minimum": -180, "maximum": 180}, {"type": "number", "minimum": -90, "maximum": 90}],
        "items": False, "minItems": 2}}),
    "invoice": thing({"number": {"type": "string", "pattern": "^INV-[0-9]{3}$"}, "date": {
        "type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"},
                      "lines": row(thing({"text": text(10), "amount": whole(1, 100), "price": whole(0, 9999)}), 2,
                                   least=1),
                      "paid": {"type": "boolean"}}),
}

OPEN_ENDED = ("number", "number_signed", "number_exclusive", "geo", "ref_recursive")
"""Those that allow texts of any length: there is no bound on the digits after a point, nor on recursion."""

SCHEMAS: dict[str, Schema] = _BASIC | _STRINGS | _OBJECTS | _ARRAYS | _CHOICES | _REFERENCES | _CALLS
