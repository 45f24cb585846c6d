"""Rebuild a `tokenizers.Tokenizer` from GGUF metadata, equal to the one the model was trained with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import ModelFormatError
from paceline.models.load.gguf import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Token types of the format; 1 is normal, 6 a raw byte."""

_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
          r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA3_WORDS = _WORDS.format(digits="{1,3}")
_QWEN2_WORDS = _WORDS.format(digits="")


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2_split,
    "default": _gpt2_split,
    "smollm": _smollm_split,
    "llama-bpe": lambda: _regex_split(_LLAMA3_WORDS),
    "llama3": lambda: _regex_split(_LLAMA3_WORDS),
    "llama-v3": lambda: _regex_split(_LLAMA3_WORDS),
    "qwen2": lambda: _regex_split(_QWEN2_WORDS),
}
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def rebuild_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """None if the file carries no tokenizer. ModelFormatError names a key that is missing or not understood."""
    model = file.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise ModelFormatError(f"{file.path} has tokenizer.ggml.model '{model}'; this version rebuilds 'gpt2' (byte-"
                               "level BPE) and 'llama' (SentencePiece BPE): use the safetensors folder instead.")
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types = _token_types(file, len(tokens))
    # Unused entries only pad the vocabulary; the real tokenizer has no such tokens.
    vocab = {token: index for index, (token, kind) in enumerate(zip(tokens, types)) if kind != _UNUSED}
    if len(vocab) != sum(kind != _UNUSED for kind in types):
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.tokens' in {file.path} holds a token twice: the file is "
                               "corrupt, download it again.")
    pre = "" if model == "llama" else _pre(file)
    try:
        tokenizer = _sentencepiece(file, tokens, types, vocab) if model == "llama" else _byte_level(file, pre, vocab)
    except ModelFormatError:
        raise
    except Exception as error:  # the library reports a merge of unknown tokens as a bare Exception
        raise ModelFormatError(f"The tokenizer in {file.path} cannot be rebuilt ({error}): metadata keys "
                               "'tokenizer.ggml.tokens' and 'tokenizer.ggml.merges' do not fit together.") from error
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)
                          for token, kind in zip(tokens, types) if kind == _USER_DEFINED and token])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, types)
                                  if (kind == _CONTROL or (kind == _UNKNOWN and model == "llama")) and token])
    _add_template(file, tokenizer, tokens, bos_by_default=model == "llama" or pre in _LLAMA3)
    return tokenizer


def _token_types(file: GGUFFile, count: int) -> list[int]:
    found = file.get("tokenizer.ggml.token_type")
    types = [1] * count if found is None else [int(kind) for kind in found]
    if len(types) != count:
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.token_type' in {file.path} has {len(types)} items for "
                               f"{count} tokens: the file is corrupt, download it again.")
    return types


def _pre(file: GGUFFile) -> str:
    pre = file.get("tokenizer.ggml.pre")
    if pre is None:
        warnings.warn(f"{file.path} does not say how it splits text into words (tokenizer.ggml.pre); GPT-2's way is "
                      "assumed. If the output looks wrong, convert the model again.", stacklevel=2)
        return "default"
    if pre not in _SPLITS:
        raise ModelFormatError(f"{file.path} has tokenizer.ggml.pre '{pre}'; this version knows "
                               f"{', '.join(_SPLITS)}: use the model's safetensors folder instead.")
    return str(pre)


def _byte_level(file: GGUFFile, pre: str, vocab: dict[str, int]) -> Tokenizer:
    merges = []
    for index, merge in enumerate(file.require("tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not space or not left or not right or " " in right:
            raise ModelFormatError(f"item {index} of metadata key 'tokenizer.ggml.merges' in {file.path} is "
                                   f"{merge!r}, not two tokens: the file is corrupt, download it again.")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int], vocab: dict[str, int]) -> Tokenizer:
    scores = file.require("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelFormatError(f"metadata key 'tokenizer.ggml.scores' in {file.path} has {len(scores)} items for "
                               f"{len(tokens)} tokens: the file is corrupt, download it again.")
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
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
        if kind != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-float(scores[index]), vocab[left], vocab[right], (left, right)))
    ranked.sort(key=lambda item: item[:3])
    return [pair for *_, pair in ranked]


def _add_template(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, bos_by_default: bool) -> None:
    """Have encode() add the begin and end tokens that the metadata asks for."""
    used: list[tuple[str, int]] = []
    parts = {}
    for role, default in (("bos", bos_by_default), ("eos", False)):
        index = file.get(f"tokenizer.ggml.{role}_token_id")
        parts[role] = ""
        if file.get(f"tokenizer.ggml.add_{role}_token", default) and index is not None:
            if not 0 <= index < len(tokens):
                raise ModelFormatError(f"metadata key 'tokenizer.ggml.{role}_token_id' in {file.path} is {index}, but "
                                       f"there are {len(tokens)} tokens: the file is corrupt, download it again.")
            used.append((tokens[index], index))
            parts[role] = tokens[index]
    if not used:
        return
    begin = [f"{parts['bos']}:0"] if parts["bos"] else []
    end = [f"{parts['eos']}:0"] if parts["eos"] else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A:0", *end], pair=[*begin, "$A:0", *end, *begin, "$B:1", *end],
        special_tokens=sorted(set(used)))
