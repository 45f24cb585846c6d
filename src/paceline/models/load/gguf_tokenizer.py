"""Rebuild a `tokenizers.Tokenizer` from GGUF metadata, equal to the one the model was trained with."""

from __future__ import annotations

import warnings
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import ModelFormatError
from paceline.models.fields import shown
from paceline.models.load.gguf import GGUFFile, Metadata
from paceline.models.load.gguf_config import token_id
from paceline.models.load.reading import reading
from paceline.models.load.word_splits import WORD_SPLITS, WordSplit

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""Token types of the format; 6 is a raw byte."""

_LONGEST_PIECE = 1024
"""Characters; SentencePiece makes pieces of 16 unless told otherwise. All ways to cut one are tried."""
_KINDS = ("gpt2", "llama", "bert")


def rebuild_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """None if the file carries no tokenizer. ModelFormatError names a key that is missing or not understood."""
    read = file.metadata
    model = read.text("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in _KINDS:
        raise ModelFormatError(f"{file.path} has tokenizer.ggml.model {shown(model)}; this version rebuilds 'gpt2' "
                               "(byte-level BPE), 'llama' (SentencePiece BPE) and 'bert' (WordPiece): use the "
                               "safetensors folder instead.")
    tokens = list(_texts(read, "tokenizer.ggml.tokens"))
    types = _token_types(file, len(tokens))
    if model == "bert":
        tokens = [_word_piece(token, kind) for token, kind in zip(tokens, types)]
    # Unused entries only pad the vocabulary; the real tokenizer has no such tokens.
    vocab = {token: index for index, (token, kind) in enumerate(zip(tokens, types)) if kind != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for kind in types):
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.tokens' in {file.path} holds a token twice: the file is "
                               "corrupt, download it again.")
    split = _word_split(file) if model == "gpt2" else WordSplit(begins=True)
    # The library reports a merge of unknown tokens as a bare Exception, and what it did not expect by a panic.
    with reading(file.path, "has a tokenizer that cannot be rebuilt, because its metadata keys 'tokenizer.ggml.*' do "
                 "not fit together"):
        if model == "gpt2":
            tokenizer = _byte_level(file, split, vocab)
        elif model == "llama":
            tokenizer = _sentencepiece(file, tokens, types, vocab)
        else:
            tokenizer = _wordpiece(file, tokens, types, vocab)
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)
                              for token, kind in zip(tokens, types) if kind == _USER_DEFINED and token])
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                      for token, kind in zip(tokens, types)
                                      if (kind == _CONTROL or (kind == _UNKNOWN and model != "gpt2")) and token])
        _add_template(file, tokenizer, tokens, bos_by_default=split.begins, eos_by_default=model == "bert")
    return tokenizer


def _texts(read: Metadata, key: str) -> tuple[str, ...]:
    found = read.texts(key)
    if found is None:
        raise read.missing(key)
    return found


def _token_types(file: GGUFFile, count: int) -> list[int]:
    found = file.metadata.numbers("tokenizer.ggml.token_type")
    types = [1] * count if found is None else found.tolist()
    if len(types) != count:
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.token_type' in {file.path} has {len(types)} items for "
                               f"{count} tokens: the file is corrupt, download it again.")
    return types


def _word_split(file: GGUFFile) -> WordSplit:
    pre = file.metadata.text("tokenizer.ggml.pre", "")
    if not pre:
        warnings.warn(f"{file.path} does not say how it splits text into words (tokenizer.ggml.pre); GPT-2's way is "
                      "assumed. If the output looks wrong, convert the model again.", stacklevel=2)
        return WORD_SPLITS["default"]
    if pre not in WORD_SPLITS:
        raise ModelFormatError(f"{file.path} has tokenizer.ggml.pre {shown(pre)}; this version knows "
                               f"{', '.join(WORD_SPLITS)}: use the model's safetensors folder instead.")
    return WORD_SPLITS[pre]


def _byte_level(file: GGUFFile, split: WordSplit, vocab: dict[str, int]) -> Tokenizer:
    merges = []
    for index, merge in enumerate(_texts(file.metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise ModelFormatError(f"item {index} of metadata key 'tokenizer.ggml.merges' in {file.path} is "
                                   f"{shown(merge)}, not two tokens: the file is corrupt, download it again.")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    normalizer = split.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int], vocab: dict[str, int]) -> Tokenizer:
    scores = file.metadata.numbers("tokenizer.ggml.scores")
    if scores is None:
        raise file.metadata.missing("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.scores' in {file.path} has {len(scores)} items for "
                               f"{len(tokens)} tokens: the file is corrupt, download it again.")
    prefix = file.metadata.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = next((token for token, kind in zip(tokens, types) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges_by_score(tokens, types, vocab, scores),
                                     unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(tokens: list[str], types: list[int], vocab: dict[str, int],
                     scores: Any) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best; as merge ranks: every split of every piece into
    two known ones, best-scored piece first."""
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, (token, kind) in enumerate(zip(tokens, types)):
        if kind != _NORMAL:
            continue
        if len(token) > _LONGEST_PIECE:
            raise ModelFormatError(f"item {index} of metadata key 'tokenizer.ggml.tokens' has {len(token):,} "
                                   "characters: such a piece is none, download the file again.")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-float(scores[index]), vocab[left], vocab[right], (left, right)))
    ranked.sort(key=lambda item: item[:3])
    return [pair for *_, pair in ranked]


def _word_piece(token: str, kind: int) -> str:
    """A piece as BERT writes it. Files mark those that begin a word (▁) instead of those that go on (##)."""
    if kind not in (_NORMAL, _USER_DEFINED):
        return token
    return token[1:] if token.startswith("▁") else "##" + token


def _wordpiece(file: GGUFFile, tokens: list[str], types: list[int], vocab: dict[str, int]) -> Tokenizer:
    unknown = token_id(file.metadata, "unknown")
    unknown = vocab.get("[UNK]") if unknown is None else unknown
    if unknown is None or unknown >= len(tokens):
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.unknown_token_id' in {file.path} is {unknown}, but words "
                               f"without pieces need one of the {len(tokens)} tokens: convert the model again.")
    # Files older than the key: a vocabulary without a capital is one of lower-cased texts.
    capitals = any(token != token.lower() for token, kind in zip(tokens, types) if kind == _NORMAL)
    lowercase = file.metadata.flag("tokenizer.ggml.normalizer.lowercase", not capitals)
    accents = file.metadata.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token=tokens[unknown], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True,
                                                      strip_accents=accents, lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


_ROLES = {"bos": (("bos", "bos"), ("cls", "bos")), "eos": (("eos", "eos"), ("seperator", "sep"))}
"""Metadata keys that name the token of a role (the format spells it so), and those that say whether it is added."""


def _added(file: GGUFFile, role: str, default: bool) -> tuple[str, int] | None:
    """Key and id of the token that is put at one end of a text; `default`: whether one is where no key says."""
    read = file.metadata
    unsaid = not any(file.has(f"tokenizer.ggml.add_{flag}_token") for _, flag in _ROLES[role])
    for name, flag in _ROLES[role]:
        found = token_id(read, name)
        if found is not None and (default if unsaid else read.flag(f"tokenizer.ggml.add_{flag}_token")):
            return f"tokenizer.ggml.{name}_token_id", found
    return None


def _add_template(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, bos_by_default: bool,
                  eos_by_default: bool) -> None:
    """Have encode() add the begin and end tokens that the metadata asks for."""
    used: list[tuple[str, int]] = []
    parts = {"bos": "", "eos": ""}
    for role, default in (("bos", bos_by_default), ("eos", eos_by_default)):
        found = _added(file, role, default)
        if found is None:
            continue
        key, index = found
        if index >= len(tokens):
            raise ModelFormatError(f"metadata key '{key}' in {file.path} is {index}, but there are {len(tokens)} "
                                   "tokens: the file is corrupt, download it again.")
        used.append((tokens[index], index))
        parts[role] = tokens[index]
    if not used:
        return
    begin = [f"{parts['bos']}:0"] if parts["bos"] else []
    end = [f"{parts['eos']}:0"] if parts["eos"] else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A:0", *end], pair=[*begin, "$A:0", *end, *begin, "$B:1", *end],
        special_tokens=sorted(set(used)))
