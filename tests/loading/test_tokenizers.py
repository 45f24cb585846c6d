"""Tokenizers: those rebuilt from GGUF metadata equal the real ones; texts survive the way there and back."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_folder, write_gguf
from small_tokenizers import (
    CORPUS,
    EDGES,
    byte_level,
    gguf_metadata,
    sentencepiece_like,
    sentencepiece_metadata,
    texts,
    wordpiece,
    wordpiece_metadata,
    write_tokenizer,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from paceline.errors import ModelFormatError, RequestError
from paceline.models.load import open_checkpoint
from paceline.models.load.word_splits import WORD_SPLITS
from paceline.models.tokenizer import Tokenizer, no_tokenizer

PRES = ["smollm", "gpt-2", "llama-bpe", "qwen2"]


def from_gguf(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(write_tokenizer(path, metadata)))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module", params=PRES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Backend, Tokenizer]:
    original = byte_level(request.param)
    folder = tmp_path_factory.mktemp("tokenizer")
    return original, from_gguf(folder / "m.gguf", {**gguf_metadata(original, request.param),
                                                   "tokenizer.ggml.add_bos_token": False})


@pytest.fixture(scope="module", params=[True, False])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Backend, Tokenizer]:
    original, scores = sentencepiece_like(prefix=request.param)
    return original, from_gguf(tmp_path_factory.mktemp("pieces") / "m.gguf",
                               {**sentencepiece_metadata(original, scores, prefix=request.param),
                                "tokenizer.ggml.add_bos_token": False})


# -- equality --------------------------------------------------------------------------------------------------------

def test_rebuilt_tokenizer_equals_the_original_on_known_texts(pair: tuple[Backend, Tokenizer]) -> None:
    original, rebuilt = pair
    words = [word for line in CORPUS[:5] for word in line.split(" ")]
    mixes = [a + b for a in EDGES for b in EDGES[:9]]
    for text in [*EDGES, *CORPUS[:5], *words, *(f" {word}" for word in words), *mixes]:
        assert rebuilt.encode(text, parse_special=True) == original.encode(text).ids, repr(text)


@given(text=texts())
def test_rebuilt_tokenizer_equals_the_original_on_any_text(pair: tuple[Backend, Tokenizer], text: str) -> None:
    original, rebuilt = pair
    ids = rebuilt.encode(text, parse_special=True)
    assert ids == original.encode(text).ids
    for skip in (True, False):
        assert rebuilt.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


@given(text=texts())
def test_byte_level_round_trip_is_exact(pair: tuple[Backend, Tokenizer], text: str) -> None:
    original, rebuilt = pair
    expected = text if original.normalizer is None else original.normalizer.normalize_str(text)
    ids = rebuilt.encode(text, add_special=False)
    assert rebuilt.decode(ids, skip_special=False) == expected


@given(text=texts())
def test_rebuilt_sentencepiece_equals_the_original(pieces: tuple[Backend, Tokenizer], text: str) -> None:
    original, rebuilt = pieces
    ids = rebuilt.encode(text, parse_special=True)
    assert ids == original.encode(text).ids
    assert rebuilt.decode(ids, False) == original.decode(ids, skip_special_tokens=False)


def best_scored_merges(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as it is defined: join the best-scored neighbours, the leftmost of equals, until none is
    left; what has no piece falls back to its bytes."""
    symbols = list(text)
    while True:
        candidates = [(-scores[vocab[a + b]], index) for index, (a, b) in enumerate(itertools.pairwise(symbols))
                      if a + b in vocab]
        if not candidates:
            break
        index = min(candidates)[1]
        symbols[index:index + 2] = [symbols[index] + symbols[index + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    original, scores = sentencepiece_like()
    rebuilt = from_gguf(tmp_path / "m.gguf", sentencepiece_metadata(original, scores))
    vocab = original.get_vocab()
    for text in [word for line in CORPUS[:5] for word in line.split()]:
        expected = best_scored_merges("▁" + text, vocab, scores)
        assert rebuilt.encode(text, add_special=False) == expected, text
        assert rebuilt.decode(expected) == text


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_rebuilt_wordpiece_equals_the_original(tmp_path_factory: pytest.TempPathFactory, lowercase: bool,
                                               said: bool) -> None:
    """Whether texts are lower-cased is said by newer files, and told by the vocabulary of older ones."""
    original = wordpiece(lowercase=lowercase)
    keys = {"tokenizer.ggml.normalizer.lowercase": lowercase} if said else {}
    rebuilt = from_gguf(tmp_path_factory.mktemp("words") / "m.gguf", {**wordpiece_metadata(original), **keys})

    @given(text=st.one_of(texts(), st.lists(st.sampled_from(" ".join(CORPUS).split(" ")), max_size=8).map(" ".join)))
    def compare(text: str) -> None:
        ids = rebuilt.encode(text)
        assert ids == original.encode(text).ids
        assert rebuilt.encode(text, add_special=False) == original.encode(text, add_special_tokens=False).ids
        stream = rebuilt.detokenizer()
        assert stream.extend(ids) + stream.flush() == rebuilt.decode(ids) == original.decode(ids)

    compare()
    assert rebuilt.encode("Fox")[0] == 2 and rebuilt.encode("Fox")[-1] == 3
    assert rebuilt.special_tokens["cls_token"] == "[CLS]" and rebuilt.special_tokens["sep_token"] == "[SEP]"
    assert rebuilt.table.kind == "words"


# -- known splits ----------------------------------------------------------------------------------------------------

def split(tokenizer: Tokenizer, text: str) -> list[bytes | None]:
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special=False)]


@pytest.mark.parametrize(("pre", "text", "words"), [
    ("smollm", " 123", [" ", "1", "2", "3"]), ("gpt-2", " 123", [" 123"]), ("llama-bpe", "12345", ["123", "45"]),
    ("qwen2", "123", ["1", "2", "3"]), ("llama-bpe", "IT'S", ["IT", "'S"]), ("gpt-2", "a\n\nb", ["a", "\n", "\n", "b"]),
    ("qwen2", "a\n\nb", ["a", "\n\n", "b"]), ("starcoder", "a12", ["a", "1", "2"]), ("dbrx", "12345", ["123", "45"]),
    ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]), ("tekken", "it's", ["it", "'s"]),
    ("gpt-4o", "fooBar it's 1234", ["foo", "Bar", " it's", " ", "123", "4"]), ("gpt-4o", "a//\nb", ["a", "//\n", "b"]),
    ("deepseek-v3", "a.b 12345\n", ["a", ".b", " ", "123", "45", "\n"]),
    ("deepseek-coder", "ab, cd12\n\n", ["ab", ",", " cd", "1", "2", "\n", "\n"]),
    ("deepseek-llm", "ab, cd12  ", ["ab", ",", " cd", "1", "2", "  "])])
def test_words_are_split_as_the_family_does(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = from_gguf(tmp_path / "m.gguf", gguf_metadata(byte_level("gpt-2"), pre))
    found = [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in found] == words


@pytest.mark.parametrize("pre", WORD_SPLITS)
@settings(max_examples=12)
@given(text=texts())
def test_no_way_of_splitting_loses_a_byte(pre: str, text: str) -> None:
    split = WORD_SPLITS[pre]
    words = [word for word, _ in split.pre_tokenizer().pre_tokenize_str(text)]
    assert decoders.ByteLevel().decode(words) == text
    assert len(words) <= len(text.encode())


def test_splits_agree_with_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = {pre: (split,) for pre, split in mapping.GGUF_PRE_TOKENIZER_SPLITS.items() if pre in WORD_SPLITS}
    assert {pre: WORD_SPLITS[pre].patterns for pre in known} == known
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"} <= known.keys()


@pytest.mark.parametrize(("pre", "composed"), [("olmo", True), ("qwen2", True), ("gpt-2", False), ("llama-bpe", False)])
def test_characters_are_composed_where_the_family_does(tmp_path: Path, pre: str, composed: bool) -> None:
    tokenizer = from_gguf(tmp_path / "m.gguf", gguf_metadata(byte_level("gpt-2"), pre))
    assert (tokenizer.decode(tokenizer.encode("e\u0301")) == "é") is composed


def test_digits_are_single_tokens_in_smollm(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path / "m.gguf", gguf_metadata(byte_level("smollm"), "smollm"))
    assert split(tokenizer, "1234") == [b"1", b"2", b"3", b"4"]


# -- special tokens --------------------------------------------------------------------------------------------------

def test_a_text_inside_another_has_no_space_put_before_it() -> None:
    tokenizer = Tokenizer(sentencepiece_like()[0])
    assert tokenizer.encode_inside(" brown") == tokenizer.encode("brown", add_special=False)
    for text in ("brown", " brown", "  brown", "é", "\n", "<s>"):
        ids = tokenizer.encode_inside(text)
        assert b"".join(tokenizer.token_bytes(token) or b"" for token in ids) == text.encode(), text


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    original = byte_level("smollm")
    tokenizer = from_gguf(tmp_path / "m.gguf", {**gguf_metadata(original, "smollm", padding=10),
                                                "tokenizer.ggml.eot_token_id": 0})
    start, end, tool = (original.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<tool>"))
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>", parse_special=True)
    assert ids[0] == start and ids[-2:] == [tool, end]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>a<tool><|im_end|>"
    assert tokenizer.special_ids == {0, start, end}
    assert tokenizer.eos_ids == {end, 0} and tokenizer.bos_id == start
    assert tokenizer.token_bytes(start) is None and tokenizer.token_bytes(tool) == b"<tool>"
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.vocab_size == original.get_vocab_size(), "unused padding entries are no tokens"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 3) is None
    assert tokenizer.decode([tokenizer.vocab_size + 3, ids[1]]) == "a"


@pytest.mark.parametrize(("pre", "flags", "begin", "end"), [
    ("smollm", {}, False, False), ("llama-bpe", {}, True, False),
    ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
    ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True)])
def test_begin_and_end_tokens_follow_the_metadata(tmp_path: Path, pre: str, flags: dict[str, bool], begin: bool,
                                                  end: bool) -> None:
    tokenizer = from_gguf(tmp_path / "m.gguf", {**gguf_metadata(byte_level(pre), pre), **flags})
    plain = tokenizer.encode("hello", add_special=False)
    bos, eos = tokenizer.backend.token_to_id("<|im_start|>"), tokenizer.backend.token_to_id("<|im_end|>")
    assert tokenizer.encode("hello") == [bos] * begin + plain + [eos] * end


def test_fingerprint_tells_vocabularies_apart_and_formats_not(tmp_path: Path) -> None:
    smollm, qwen = byte_level("smollm"), byte_level("qwen2")
    rebuilt = from_gguf(tmp_path / "m.gguf", gguf_metadata(smollm, "smollm"))
    assert rebuilt.fingerprint() == Tokenizer(smollm).fingerprint() != Tokenizer(qwen).fingerprint()


# -- folders ---------------------------------------------------------------------------------------------------------

def folder_with(tmp_path: Path, config: dict[str, Any], **files: Any) -> Tokenizer | None:
    import torch
    folder = write_folder(tmp_path / "m", config, [{"a": torch.ones(1)}])
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer.from_checkpoint(open_checkpoint(folder))


def test_a_folder_gathers_every_end_token(tmp_path: Path) -> None:
    backend = byte_level("smollm")
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer = folder_with(
        tmp_path, {"eos_token_id": 7, "bos_token_id": 0}, tokenizer=backend.to_str(),
        generation_config={"eos_token_id": [8, 9]},
        tokenizer_config={"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None})
    assert tokenizer is not None
    assert tokenizer.eos_ids == {7, 8, 9, 2} and tokenizer.bos_id == 1
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    text = "a long text that neither truncation nor padding may touch"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and tokenizer.decode(ids) == text


def test_a_model_without_tokenizer_has_none_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    assert folder_with(tmp_path, {}) is None
    assert Tokenizer.from_checkpoint(open_checkpoint(write_gguf(tmp_path / "m.gguf"))) is None
    assert "token ids only" in str(no_tokenizer(tmp_path))


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        folder_with(tmp_path, {}, tokenizer='{"model": 3}')


def test_half_a_character_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="surrogates"):
        Tokenizer(byte_level("gpt-2")).encode("a\ud800b")


# -- faults in GGUF metadata -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("change", "hint"), [
    ({"tokenizer.ggml.pre": "martian"}, r"tokenizer\.ggml\.pre 'martian'; .*llama-bpe.*qwen2.*tekken"),
    ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv'.*'gpt2'.*'llama'.*'bert'"),
    ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.unknown_token_id"),
    ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.unknown_token_id": 99999}, r"unknown_token_id'.* is 99999"),
    ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
    ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges"),
    ({"tokenizer.ggml.merges": ["a b", "nospace"]}, r"item 1 of .*merges"),
    ({"tokenizer.ggml.merges": ["zz qq"]}, "do not fit together"),
    ({"tokenizer.ggml.token_type": [1, 2]}, r"token_type'.* 2 items"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
    ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 99999}, "bos_token_id'.*99999"),
    ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores"),
])
def test_faulty_tokenizer_metadata_is_named(tmp_path: Path, change: dict[str, Any], hint: str) -> None:
    metadata = {**gguf_metadata(byte_level("smollm"), "smollm"), **change}
    with pytest.raises(ModelFormatError, match=hint):
        from_gguf(tmp_path / "m.gguf", metadata)


def test_a_file_that_does_not_name_its_splitting_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        from_gguf(tmp_path / "m.gguf", {**gguf_metadata(byte_level("gpt-2"), ""), "tokenizer.ggml.pre": None})
