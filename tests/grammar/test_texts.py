"""Regular expressions, choices, grammars: every text that comes out matches, and what matches can come out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.structured import PADDED, PROMPT, compiled, random_text, structured_llm, tokenizer
from paceline import SamplingParams
from paceline.grammar.sequence import SequenceGrammar

LETTERS = "abcXYZ019 _-äß日😀"


def started(**structure: Any) -> SequenceGrammar:
    return SequenceGrammar(compiled(**structure), PADDED, tokenizer().eos_ids)


def accepts(grammar: SequenceGrammar, text: str) -> bool:
    """Whether the tokenizer's own tokens of `text` may come, and the end after them."""
    for token in tokenizer().encode(text, add_special=False):
        mask = grammar.mask(())
        if mask is None or not mask[token]:
            return False
        grammar.append([token])
    mask = grammar.mask(())
    return mask is not None and all(mask[end] for end in tokenizer().eos_ids)


def _repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["?", "{2}", "{0,2}", "{1,3}"])
    return st.builds(lambda body, count: f"(?:{body}){count}", inner, counts)


REGEX = st.recursive(
    st.sampled_from(["a", "b", "0", "[a-c]", "[^a-z]", "[0-9]{2}", "ä", "日", "\\.", "\\-", "x|y", "(?:ab|ba)", "\\\\",
                     '"']),
    lambda inner: st.one_of(_repeated(inner), st.builds(lambda a, b: f"(?:{a}){b}", inner, inner),
                            st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner)), max_leaves=6)


@settings(max_examples=40, deadline=None)
@given(REGEX, st.integers(0, 99))
def test_what_a_regex_lets_out_python_matches(regex: str, seed: int) -> None:
    text, ended = random_text(started(regex=regex), seed)
    assert ended and re.fullmatch(regex, text), (regex, text)


@settings(max_examples=40, deadline=None)
@given(REGEX, st.text(LETTERS, max_size=6))
def test_a_regex_lets_in_what_python_matches(regex: str, text: str) -> None:
    assert accepts(started(regex=regex), text) == (re.fullmatch(regex, text) is not None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=6),
       st.integers(0, 9))
def test_a_choice_is_one_of_the_choices(choices: list[str], seed: int) -> None:
    text, ended = random_text(started(choice=choices), seed)
    assert ended and text in choices
    for choice in choices:
        assert accepts(started(choice=choices), choice)


def test_thousands_of_choices_are_no_trouble() -> None:
    choices = [f"value {n * 7919 % 10007}" for n in range(5000)]
    assert random_text(started(choice=choices), 1)[0] in choices


ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
LIST = """
root  ::= "[" ws item ("," ws item)* "]"
item  ::= [a-z]+ | "\\"" [^"\\n]* "\\""
ws    ::= " "?
"""


@pytest.mark.parametrize(("grammar", "inside", "outside"), [
    (ARITHMETIC, ["1", "1+2*3", "(1+(22))/7", "((9))"], ["", "1+", "1+2)", "1234", "a"]),
    (LIST, ["[a]", "[ a, b,c]", '["x y", z]', '[""]'], ["[]", "[a", "[A]", "[a,  b]"]),
    ('root ::= "yes" | "no"', ["yes", "no"], ["ye", "maybe"]),
    ('start: "ä" "日"? | /x+/', ["ä", "ä日", "xxx"], ["日", "äx"]),
    ('start: "a" start "b" | "c"', ["c", "acb", "aaacbbb"], ["ab", "aacb"]),
], ids=["arithmetic", "list in GBNF", "alternatives", "unicode", "matching pairs"])
def test_grammars_in_both_notations(grammar: str, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert accepts(started(grammar=grammar), text), text
    for text in outside:
        assert not accepts(started(grammar=grammar), text), text


def test_every_kind_of_structure_through_the_engine() -> None:
    structures: list[dict[str, Any]] = [
        {"regex": "[a-f]{2}-[0-9]{3}"}, {"choice": ["red", "green", "light green"]}, {"grammar": ARITHMETIC},
        {"json_schema": '{"type": "boolean"}'}, {"json_schema": True}]
    params = [SamplingParams(max_tokens=300, seed=4, **one) for one in structures]
    llm = structured_llm()
    plain = llm.generate([PROMPT] * 5, params)
    drafted = llm.generate([PROMPT] * 5, params, speculation={"method": "auto", "adaptive": False})
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    texts = [out.outputs[0].text for out in plain]
    assert re.fullmatch("[a-f]{2}-[0-9]{3}", texts[0])
    assert texts[1] in ("red", "green", "light green")
    assert texts[3] in ("true", "false")
    if plain[2].outputs[0].finish_reason == "stop":
        assert re.fullmatch("[-+*/()0-9]+", texts[2])
