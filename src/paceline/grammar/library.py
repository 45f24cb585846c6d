"""The one place that knows llguidance: a vocabulary and a structure in, a matcher out, errors in our words."""

from __future__ import annotations

import json
import re
import time
from itertools import chain, islice
from typing import Any

from paceline.errors import GrammarError
from paceline.grammar.schemas import whitespace
from paceline.grammar.structure import Structure
from paceline.grammar.vocabulary import Vocabulary

INSTALL = "pip install llguidance"
MARKS = ("{", '"', ":", ",", "}", "[", "]")
TRIED = 24
"""Steps of a text that is tried out: what grows too complex for the parser mostly does so early."""
TRIED_S = 0.25
"""Seconds of computing that this may take."""
UNSATISFIABLE = "no text matches it"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


class _Tokens:
    """A Vocabulary in the form llguidance asks for. The end of a text is an id of its own, one past the vocabulary:
    which tokens end a text is each request's affair."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [token or b"" for token in vocabulary.tokens] + [b""]
        self.eos_token_id = len(vocabulary.tokens)
        self._spell = vocabulary.spell

    def __call__(self, text: str) -> list[int]:
        return self._spell(text)


class Library:
    """llguidance around one vocabulary. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes some tenths of a second. Raises ImportError where llguidance is missing."""
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(vocabulary)))
        spelled = [vocabulary.spell(mark) for mark in MARKS]
        self._marks = [tokens[0] for tokens in spelled if len(tokens) == 1]
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, structure: Structure) -> Any:
        """A matcher at the beginning of a text. Raises a GrammarError that names the field and the reason."""
        field = structure.field
        try:
            source = self._source(structure)
            if structure.after:
                source = _behind(structure.after, source)
            matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            problem = reason(matcher)
            if problem is None:
                possible = any(matcher.compute_bitmask())
                problem = reason(matcher) or (None if possible or matcher.is_accepting() else UNSATISFIABLE)
            if problem is None:
                problem = self._try_out(matcher.deep_copy())
        except (ValueError, TypeError, RuntimeError) as error:
            problem = _in_a_line(str(error))
        if problem is not None:
            raise GrammarError(f"{field} cannot be used: {problem.rstrip('.')}. Correct or simplify it.", field)
        return matcher

    def _try_out(self, matcher: Any) -> str | None:
        """Write the beginning of a text, from mark to mark: why that cannot go on, if it cannot. Better now than when
        half an answer is told."""
        began = time.thread_time()
        for turn in range(TRIED):
            mask = matcher.compute_bitmask()
            if (problem := reason(matcher)) is not None or matcher.is_stopped():
                return problem
            tokens = matcher.compute_ff_tokens()
            if not tokens:
                turned = turn % max(len(self._marks), 1)
                marks = (token for token in self._marks[turned:] + self._marks[:turned]
                         if mask[token >> 3] >> (token & 7) & 1)
                others = (8 * at + (byte & -byte).bit_length() - 1 for at, byte in enumerate(mask) if byte)
                tokens = list(islice(chain(marks, others), 1))
            if not tokens or time.thread_time() - began > TRIED_S:
                return None
            matcher.consume_tokens(tokens)
        return reason(matcher)

    def _source(self, structure: Structure) -> str:
        """The structure in llguidance's own notation."""
        library, text = self._library, structure.text
        if structure.field == "json_schema":
            schema = json.loads(text)
            own = "x-guidance" in schema  # llguidance's options, in the schema's own hands
            return str(library.LLMatcher.grammar_from_json_schema(
                text, defaults={} if own else {"whitespace_pattern": whitespace(schema)}))
        if structure.field == "regex":
            return str(library.LLMatcher.grammar_from_regex(text))
        if structure.field == "choice":
            # One expression: as alternatives of a grammar, thousands of them would take minutes.
            texts = (_META.sub(r"\\\g<0>", choice) for choice in json.loads(text))
            return str(library.LLMatcher.grammar_from_regex("|".join(f"(?:{choice})" for choice in texts)))
        return str(library.grammar_from("grammar", text))


def _behind(before: str, source: str) -> str:
    """One grammar behind another: `source` has several grammars at most, the first of which is what it is about."""
    own = source.lstrip().startswith("{")  # else it is in Lark's notation
    first, *others = json.loads(source)["grammars"] if own else [{"lark_grammar": source}]
    both = "start: before @structure\n" + before.replace("start:", "before:", 1)
    return json.dumps({"grammars": [{"lark_grammar": both}, first | {"name": "structure"}, *others]})


def reason(matcher: Any) -> str | None:
    """Why a matcher gave up, in a line; None: it has not."""
    if not matcher.is_error():
        return None
    message = _in_a_line(matcher.get_error())
    return UNSATISFIABLE if message.startswith("NoExtension") else message


def _in_a_line(message: str) -> str:
    """The first line of what the library says. Of expressions the reason stands further below; where in a grammar that
    a server wrote a schema stands, nobody wants to know."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it failed without saying why"]
    first = lines[0].rpartition("failed to compile JSON schema: ")[2]
    if "recursion limit exceeded" in first:
        return "it is nested too deeply"
    if first.startswith("oneOf constraints"):  # what the library advises is its own option, which would keep less
        return "a text could fit two branches of its oneOf, of which only one may hold; write anyOf, or branches apart"
    why = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    return f"{first} {why}" if why and first.endswith(":") else first
