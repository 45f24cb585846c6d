"""Incremental detokenising: piece by piece the same text as all at once, and never half a character."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece_like, texts
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from paceline.models.tokenizer import Tokenizer


def make(kind: str) -> Tokenizer:
    if kind.startswith("pieces"):
        return Tokenizer(sentencepiece_like(prefix=kind == "pieces")[0])
    backend = byte_level("smollm")
    if kind == "bytes with odd added tokens":
        backend.add_tokens([AddedToken("été à la", normalized=False), AddedToken("né", normalized=False)])
        backend.add_special_tokens([AddedToken("<fin é>", special=True)])
    if kind in ("metaspace", "metaspace without prefix"):
        backend = sentencepiece_like()[0]
        backend.decoder = decoders.Metaspace("▁", "always" if kind == "metaspace" else "never")
    if kind == "no decoder":
        backend = Backend(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "é": 5}, unk_token="a"))
        backend.add_special_tokens(["<s>"])
    if kind.startswith("wordpiece"):
        words = ["play", "##ing", "<s>", ".", "n't", "do not", "##.", "é", "'s", "##'s", "##", ",", "?"]
        backend = Backend(models.WordLevel({word: 2 * index for index, word in enumerate(words)}, unk_token="play"))
        backend.decoder = decoders.WordPiece("##", cleanup=kind == "wordpiece")
        backend.add_special_tokens(["<s>"])
    if kind == "byte level in a sequence":
        backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    return Tokenizer(backend)


KINDS = {
    "bytes": "bytes", "bytes with odd added tokens": "bytes", "byte level in a sequence": "bytes",
    "pieces": "pieces", "pieces without prefix": "pieces", "metaspace": "pieces", "metaspace without prefix": "pieces",
    "no decoder": "opaque", "wordpiece": "words", "wordpiece as it is": "words",
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = make(request.param)
    assert made.table.kind == KINDS[request.param]
    return made


@functools.cache
def single_bytes(tokenizer: Tokenizer) -> list[int]:
    """Tokens of one byte each; where there is none, the first token."""
    return [token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token) or b"ab") == 1] or [0]


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_what_decode_gives_for_random_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@given(data=st.data(), skip=st.booleans())
def test_raw_byte_tokens_in_any_order(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Mostly single bytes, so that broken, overlong and half characters are common."""
    ids = data.draw(st.lists(st.one_of(st.sampled_from(single_bytes(tokenizer)), st.integers(0, 2)), max_size=16))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@given(text=texts())
def test_valid_text_streams_without_replacement_characters(text: str) -> None:
    tokenizer = shared()
    parts = streamed(tokenizer, tokenizer.encode(text, add_special=False), False)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@functools.cache
def shared() -> Tokenizer:
    return Tokenizer(byte_level("smollm"))


def test_half_a_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = shared()
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    grin = [by_bytes[bytes([byte])] for byte in "😀".encode()]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(token) for token in grin] == ["", "", "", "😀"]
    assert detokenizer.push(grin[0]) == "" and detokenizer.flush() == "\ufffd"
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.extend([grin[0], by_bytes[b"a"]]) == "\ufffda", "bytes that can no longer become a character"


def test_sequences_do_not_share_state() -> None:
    tokenizer = shared()
    lead = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xf0")
    one, two = tokenizer.detokenizer(), tokenizer.detokenizer()
    assert one.push(lead) == "" and two.extend(tokenizer.encode("hi")) == "hi"


@given(data=st.data(), skip=st.booleans())
def test_a_text_that_goes_on_is_what_its_ids_add(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """In the middle of a text no decoder takes a space off, whatever stands first there."""
    before = next([token] for token, name in enumerate(tokenizer.table.tokens) if name in ("a", "play"))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=20))
    detokenizer = tokenizer.detokenizer(skip, before)
    added = detokenizer.extend(ids) + detokenizer.flush()
    assert tokenizer.decode(before, skip) + added == tokenizer.decode(before + ids, skip)


def test_a_text_after_special_tokens_alone_is_in_the_middle_too() -> None:
    """Its tokens then stand for the same bytes as everywhere: those that grammars and stop strings are about."""
    tokenizer = make("pieces")
    quick = tokenizer.encode("quick")
    assert tokenizer.detokenizer().extend(quick) == "quick"
    assert tokenizer.detokenizer(after=[1]).extend(quick) == " quick"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_half_a_character_before_a_text_is_completed_and_a_whole_one_is_not_told_again(kind: str) -> None:
    tokenizer = make(kind)
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    grin = [by_bytes[bytes([byte])] for byte in "😀".encode()]
    half = tokenizer.detokenizer(after=grin[:3])
    assert half.extend([grin[3], by_bytes[b"a"]]) + half.flush() == "😀a"
    whole = tokenizer.detokenizer(after=grin)
    assert whole.extend(grin) + whole.flush() == "😀"
    broken = tokenizer.detokenizer(after=grin)
    assert broken.extend(grin[:1]) + broken.flush() == "\ufffd"
