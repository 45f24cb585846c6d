"""Tokenizers of GGUF files with SentencePiece vocabularies against SentencePiece itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CORPUS, EDGES, texts, write_tokenizer

from paceline.models.load import open_checkpoint
from paceline.models.tokenizer import Tokenizer

LINES = [line for text in CORPUS for line in text.split("\n")] + ["aaaa aaa aa a      b  "] * 3


def trained(*, prefix: bool, fallback: bool, user_defined: tuple[str, ...] = ()) -> Any:
    """A BPE model as Llama's: texts are not normalised, characters without a piece become bytes (or unknown)."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, vocab_size=420, model_type="bpe", byte_fallback=fallback,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=prefix,
        character_coverage=0.98, minloglevel=2, user_defined_symbols=list(user_defined))
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def metadata(model: Any, prefix: bool, user_defined: tuple[str, ...] = ()) -> dict[str, Any]:
    """What converters write; user-defined pieces have real spaces there."""
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    kinds = ((model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6),
             (lambda i: pieces[i] in user_defined, 4))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.replace("▁", " ") if piece in user_defined else piece for piece in pieces],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(), "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(), "tokenizer.ggml.add_space_prefix": prefix}


@pytest.fixture(scope="module", params=[(True, True), (False, True), (True, False)],
                ids=["prefix", "no prefix", "no bytes"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    prefix, fallback = request.param
    model = trained(prefix=prefix, fallback=fallback)
    path: Path = write_tokenizer(tmp_path_factory.mktemp("pieces") / "m.gguf", metadata(model, prefix))
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path))
    assert tokenizer is not None and tokenizer.table.kind == "pieces"
    return model, tokenizer


def check(pair: tuple[Any, Tokenizer], text: str) -> None:
    model, tokenizer = pair
    ids = tokenizer.encode(text, add_special=False)
    assert ids == model.encode(text)
    if model.unk_id() not in ids:  # SentencePiece writes ⁇ for unknown, the engine leaves special tokens out
        stream = tokenizer.detokenizer()
        assert stream.extend(ids) + stream.flush() == tokenizer.decode(ids) == model.decode(ids)


def test_known_texts(pair: tuple[Any, Tokenizer]) -> None:
    for text in [*EDGES, *LINES[:8], " ".join(LINES[:4])]:
        check(pair, text)
    model, tokenizer = pair
    assert tokenizer.encode("hello") == [model.bos_id(), *model.encode("hello")]


@given(text=st.one_of(texts(), st.text("a b", max_size=30), st.text(st.sampled_from("the quick▁ \nx"), max_size=40)))
def test_any_text(pair: tuple[Any, Tokenizer], text: str) -> None:
    check(pair, text)


def test_user_defined_pieces_as_gemma_has_them(tmp_path: Path) -> None:
    """Runs of spaces and markup are pieces of their own, and no text gets a space in front."""
    own = ("▁▁", "▁▁▁", "▁▁▁▁", "<tool>", "\n\n")
    model = trained(prefix=False, fallback=True, user_defined=own)
    path = write_tokenizer(tmp_path / "m.gguf", metadata(model, False, own))
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path))
    assert tokenizer is not None

    @given(text=st.lists(st.sampled_from(["the", " ", "  ", "     ", "\n", "<tool>", "<to", "a", " quick", "é", "😀"]),
                         max_size=12).map("".join))
    def compare(text: str) -> None:
        check((model, tokenizer), text)

    compare()
