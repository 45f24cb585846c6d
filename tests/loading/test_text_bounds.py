"""How many characters a token can stand for: a bound that never refuses what would fit, or none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece_like, texts, wordpiece
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.errors import RequestError
from paceline.models.detokenizer import latin_of_byte_characters
from paceline.models.text_bounds import text_bound
from paceline.models.tokenizer import Tokenizer


def _without(backend: Backend, characters: str) -> Backend:
    """As the default model's is: without bytes that nobody writes."""
    state = json.loads(backend.to_str())
    alphabet = {latin: written for written, latin in latin_of_byte_characters().items()}
    for character in characters:
        del state["model"]["vocab"][alphabet[character]]
        state["model"]["merges"] = [pair for pair in state["model"]["merges"] if alphabet[character] not in str(pair)]
    return Backend.from_str(json.dumps(state))


BOUNDED = {"smollm": byte_level("smollm"), "qwen2": byte_level("qwen2"), "llama": sentencepiece_like()[0],
           "few bytes": _without(byte_level("smollm"), "\x04\x06\x1d")}
DECOMPOSED = "\u03b1\u0313\u0300\u0345"
"""Four characters that NFC makes one of."""


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=50, deadline=None)
@given(text=texts() | st.text() | st.text("\x04\x06\x1d\xe9ab", max_size=400)
       | st.integers(1, 40).map(lambda n: DECOMPOSED * n))
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    bound = text_bound(BOUNDED[name])
    assert bound is not None
    assert bound.holds(text, len(BOUNDED[name].encode(text, add_special_tokens=False).ids))


def _with(backend: Backend, **parts: Any) -> Backend:
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def _swallowing() -> Backend:
    backend = byte_level("smollm")
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize("backend", [
    wordpiece(lowercase=True), byte_level("smollm", alphabet=False), _swallowing(),
    *(_with(byte_level("smollm"), normalizer=one) for one in (
        normalizers.Strip(), normalizers.StripAccents(), normalizers.Replace(Regex(" +"), " "),
        normalizers.Replace("x", ""), normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()]))),
    _with(byte_level("smollm"), pre_tokenizer=pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
    _with(byte_level("smollm"), pre_tokenizer=pre_tokenizers.Sequence([
        pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()])),
])
def test_what_may_drop_text_has_no_bound(backend: Backend) -> None:
    """Any number of characters may become one token there: spaces that are stripped, unknown ones, ..."""
    assert text_bound(backend) is None
    Tokenizer(backend).check_length("x" * 10_000_000, 1)


def test_normalizers_that_compose_or_shorten_widen_the_bound() -> None:
    plain = text_bound(byte_level("smollm"))
    assert plain is not None and not plain.dropped
    assert text_bound(_with(byte_level("smollm"), normalizer=normalizers.NFC())) == (4 * plain.each, ())
    assert text_bound(_with(byte_level("smollm"), normalizer=normalizers.Replace("xxx", "y"))) == (3 * plain.each, ())


def test_characters_that_no_token_has_count_for_nothing() -> None:
    backend = BOUNDED["few bytes"]
    bound = text_bound(backend)
    assert bound is not None and bound.dropped == ("\x04", "\x06", "\x1d")
    assert backend.encode("\x04" * 1000).ids == [] and bound.holds("\x04" * 1000, 0)
    assert not bound.holds("\x04" * 1000 + "a", 0)
    assert text_bound(_with(_without(byte_level("smollm"), "\x04"), normalizer=normalizers.Prepend("\x04"))) is None
    assert text_bound(_without(byte_level("smollm"), "\x81")) is None


@pytest.mark.parametrize("normalizer, text", [(normalizers.Lowercase(), "A"), (normalizers.NFC(), "\u037e"),
                                              (normalizers.NFKC(), "\uff41")])
def test_characters_that_become_what_no_token_has_count_for_nothing(normalizer: Any, text: str) -> None:
    backend = _with(_without(byte_level("smollm"), "a;"), normalizer=normalizer)
    assert backend.encode(text * 1000).ids == []
    bound = text_bound(backend)
    assert bound is None or bound.holds(text * 1000, 0)
    assert text_bound(_with(_without(byte_level("smollm"), "\x04"), normalizer=normalizer)) is not None


def test_a_text_that_cannot_fit_is_refused_by_its_length() -> None:
    tokenizer = Tokenizer(byte_level("smollm"))
    bound = text_bound(tokenizer.backend)
    assert bound is not None
    each = bound.each
    tokenizer.check_length("x" * 10 * each, 10)
    with pytest.raises(RequestError, match="characters") as caught:
        tokenizer.check_length("x" * (10 * each + 1), 10, "messages")
    assert caught.value.param == "messages"


TEXT = "a text that goes on and on " * 20_000


@pytest.mark.parametrize("work", [
    lambda tokenizer: tokenizer.encode(TEXT), lambda tokenizer: tokenizer.encode(TEXT + "<|im_end|>"),
    lambda tokenizer: tokenizer.control.encode_guarded(TEXT), lambda tokenizer: tokenizer.decode([70] * 1_000_000)])
def test_others_run_while_a_long_text_is_read(work: Callable[[Tokenizer], Any]) -> None:
    """With the interpreter's lock held, no other thread gets a turn before the end."""
    tokenizer = Tokenizer(byte_level("smollm"))
    tokenizer.encode("<|im_end|>")  # makes the twin
    turns, over = 0, threading.Event()

    def others() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0.001)

    beside = threading.Thread(target=others)
    beside.start()
    try:
        before = turns
        work(tokenizer)
        assert turns - before >= 10
    finally:
        over.set()
        beside.join()
