"""Random structures: masks are those of a reference that knows the language, texts are what others check them for."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from fuzz.languages import Language, regex, schema
from grammar.structured import PADDED, PROMPT, compiled, random_text, structured_llm, tokenizer
from paceline import SamplingParams
from paceline.grammar.sequence import SequenceGrammar

FEW, MANY = range(12), range(12, 212)
END = sorted(tokenizer().eos_ids)[0]
TOKENS = [(token, text) for token in range(tokenizer().vocab_size)
          if token not in tokenizer().special_ids and (text := tokenizer().token_bytes(token))]
STEPS = 14


def drawn(seed: int) -> tuple[dict[str, Any], Language]:
    luck = random.Random(seed)
    if seed % 2:
        text, language = regex(luck)
        return {"regex": text}, language
    found, language = schema(luck)
    return {"json_schema": found | {"x-guidance": {"whitespace_flexible": False}}}, language


def expected(language: Language) -> np.ndarray:
    """By trying every token."""
    mask = np.zeros(PADDED, dtype=bool)
    first = language.first()
    for token, text in TOKENS:
        mask[token] = text[0] in first and language.spelled(text).kind != "nothing"
    mask[END] = language.empty
    return mask


def check_masks(seed: int) -> None:
    structure, language = drawn(seed)
    if language.kind == "empty":
        return
    grammar, luck = SequenceGrammar(compiled(**structure), PADDED, [END]), random.Random(seed)
    for _ in range(STEPS):
        want, got = expected(language), grammar.mask(())
        assert got is not None
        if len(language.first()) > 1 or language.empty:
            assert np.array_equal(got, want), (structure, _names(got ^ want))
        else:  # where there is one way to go, it is gone in the tokenizer's own tokens
            assert got.any() and not (got & ~want).any(), (structure, _names(got & ~want))
        allowed = [token for token in np.flatnonzero(got).tolist() if token != END]
        if not allowed:
            break
        token = luck.choice(allowed)
        grammar.append([token])
        language = language.spelled(dict(TOKENS)[token])


def _names(mask: np.ndarray) -> list[str]:
    return [tokenizer().decode([token], skip_special=False) for token in np.flatnonzero(mask)[:9].tolist()]


def check_text(structure: dict[str, Any], text: str) -> None:
    """By others: Python's expressions, jsonschema."""
    if "regex" in structure:
        assert re.fullmatch(structure["regex"], text, re.DOTALL), (structure, text)
    else:
        jsonschema.validate(json.loads(text), structure["json_schema"])


def check_walks(seed: int) -> None:
    structure, language = drawn(seed)
    for turn in range(3):
        text, ended = random_text(SequenceGrammar(compiled(**structure), PADDED, [END]), 31 * seed + turn)
        assert language.spelled(text.encode()).kind != "nothing", (structure, text)
        if ended:
            assert language.spelled(text.encode()).empty
            check_text(structure, text)


@pytest.mark.parametrize("seed", FEW)
def test_masks_are_those_of_the_language(seed: int) -> None:
    check_masks(seed)
    check_walks(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_masks_are_those_of_many_languages(seed: int) -> None:
    check_masks(seed)
    check_walks(seed)


def check_engine(seeds: range) -> None:
    """All at once in one engine, drafted for or not: texts that ended belong to their languages, and are those of each
    alone."""
    luck, structures = random.Random(seeds[0]), [drawn(seed)[0] for seed in seeds]
    params = [SamplingParams(**structure, seed=seed, max_tokens=60, temperature=luck.choice([0.7, 1.0]))
              for seed, structure in zip(seeds, structures)]
    wishes = [luck.choice([None, {"method": "auto", "adaptive": False}, {"method": "ngram", "adaptive": False},
                           {"method": "suffix", "tree": True, "adaptive": False}]) for _ in seeds]
    outs = structured_llm(kv_blocks=60, block_size=4, max_model_len=200, watermark=0.0, max_prefill_chunk=3).generate(
        [PROMPT] * len(params), params, speculation=wishes)
    plain = structured_llm(enable_prefix_caching=False)
    for structure, one, out in zip(structures, params, outs):
        assert out.error is None, (structure, out.error)
        assert out.outputs[0].token_ids == plain.generate([PROMPT], one)[0].outputs[0].token_ids, structure
        if out.outputs[0].finish_reason == "stop":
            check_text(structure, out.outputs[0].text)


def test_texts_belong_to_their_languages() -> None:
    check_engine(range(300, 308))


@pytest.mark.full
@pytest.mark.parametrize("first", range(400, 600, 20))
def test_texts_of_many_structures_belong_to_their_languages(first: int) -> None:
    check_engine(range(first, first + 20))
