"""Words for the tiny models: a tokenizer of their size, and controls of the text that Hypothesis draws for it."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.tiny import VOCAB
from paceline.models.tokenizer import Tokenizer

END, TOOL = "<|end|>", "<|tool|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SINGLE = [*LETTERS, *"0123456789", *'{}[]":,.-', "Ġ", "Ċ", "Ã", "©"]
"""In the alphabet of byte-level tokenizers: a space, a new line, and the two bytes of é come last."""
MERGES = [
    ("a", "b"), ("b", "a"), ("a", "a"), ("b", "b"), ("c", "d"), ("a", "n"), ("t", "r"), ("u", "e"), ("tr", "ue"),
    ("f", "a"), ("l", "s"), ("fa", "ls"), ("fals", "e"), ("n", "u"), ("l", "l"), ("nu", "ll"), ("n", "a"), ("m", "e"),
    ("na", "me"), ("y", "e"), ("ye", "s"), ("n", "o"), ("1", "0"), ("0", "0"), ("1", "2"), ("{", '"'), ('"', "}"),
    ('"', ":"), ('":', "Ġ"), (",", "Ġ"), ('"', "name"), ('{"', "name"), ("Ġ", "a"), ("Ġ", "b"), ("Ġ", "Ġ"), ("[", "]"),
    ("o", "n"), ("on", "e"), ("e", "s"), ("t", "h"), ("th", "e"), ("i", "n")]
NAMELESS = 4
"""Ids at the end without a token, as in models whose embedding is rounded up."""


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE: most words take several tokens, and most texts can be cut into tokens in several ways."""
    names = [END, TOOL, *SINGLE, *("".join(pair) for pair in MERGES)]
    assert len(set(names)) == len(names) == VOCAB - NAMELESS
    backend = Backend(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=MERGES))
    backend.add_special_tokens([AddedToken(name, special=True) for name in (END, TOOL)])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_ids=[0], special_tokens={"eos_token": END})


SCHEMAS: list[Any] = [
    True, {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 120}, {"enum": ["yes", "no", None, 12]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^[a-e]{2,9}$"},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "an": {"type": "integer"}},
     "required": ["name", "an"], "additionalProperties": False},
    {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["one", "the"]}}, "required": ["b"],
     "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}]
GRAMMARS = ['start: ("ab" | "ba" | NUMBER)+\nNUMBER: /[0-9]{1,3}/',
            'root ::= "[" item ("," item)* "]"\nitem ::= [a-d]+']
TEXTS = st.text("ab01e é", min_size=1, max_size=8) | st.sampled_from(["yes", "no", "true", "false", "the name"])


def regexes() -> st.SearchStrategy[str]:
    """Some end by themselves, some may end or go on, some have only one way to go for a while."""
    parts = st.sampled_from(["[a-z]", "[ab]", "(ab|ba|é)", "[0-9]", "(true|false|null)", "x", ", ", "[^a-m]", "."])
    times = st.sampled_from(["", "+", "*", "{2}", "{1,3}", "{4,9}"])
    return st.lists(st.tuples(parts, times).map("".join), min_size=1, max_size=4).map("".join)


def structures() -> st.SearchStrategy[dict[str, Any]]:
    """One of the parameters that say which texts are allowed."""
    def named(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: values})

    return st.one_of(named("regex", regexes()), named("json_schema", st.sampled_from(SCHEMAS)),
                     named("choice", st.lists(TEXTS, min_size=1, max_size=4)),
                     named("grammar", st.sampled_from(GRAMMARS)))


PIECES = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3)), max_size=2)
"""Where in a text words are taken from, and how long they are: words that a text does not come to would change
nothing."""


def words_of(tokens: list[int], pieces: list[tuple[int, int]]) -> list[str]:
    """Pieces of what was said in so many tokens, as text. Halves of characters and special tokens are left out."""
    found = (tokenizer().decode(tokens[at % len(tokens):][:length]) for at, length in pieces if tokens)
    return list(dict.fromkeys(word for word in found if word and "\ufffd" not in word))


def parts_of(text: str, pieces: list[tuple[int, int]]) -> list[str]:
    """Pieces of a text in characters, wherever its tokens begin and end."""
    found = (text[at % len(text):][:length] for at, length in pieces if text)
    return list(dict.fromkeys(found))
