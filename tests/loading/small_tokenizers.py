"""Small trained tokenizers, and the GGUF files converters would make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from model_files import write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog 1234567890 times; it's 12,345.67 o'clock, isn't it? We'll see.",
    "    def main(argv):\n\treturn argv[0]\r\n\r\n\n\n   trailing   ",
    "naïve café – déjà vu … “quotes” 你好，世界 こんにちは привет",
    "😀😃 👩‍👩‍👧 ﷽ e\u0301 n\u0303 \u200b zero",
    "HELLO'S WORLD'LL DON'T 99 999 9999 a1b2c3 <tag attr='x'/> https://example.org/?q=1&r=2",
] * 4

EDGES = ["", " ", "  ", "\n", "\n\n", " \n ", "\t", "a", " a", "  a", "a ", "1", "12", "123", "1234", " 1", " 12 345",
         "1 2", "3.14", "x1y22z333", "٣٤٥", "Ⅷ", "½ ²", "it's IT'S It'S", "'ll", "don't", "hello\r\nworld", "\r\n\r\n",
         "a\u00a0b",
         "e\u0301", "\u0301", "ﬁ", "İ", "👩‍👩‍👧", "🇩🇪", "\u200d", "\ufeff", "\x00\x01\x7f", "$%^&*()", "a" * 50,
         "   \t \n x", "<|im_start|>",
         "<|im_start|>user\nhi<|im_end|>\n", "x<tool>y", "<|im_start", "你好 world 123", "\u2028", "ǅ", "１２３"]

SPECIAL, ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool>"]

_PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
             r"|\s+(?!\S)|\s+",
}


def texts() -> st.SearchStrategy[str]:
    """Digits, spaces, newlines, unicode, emoji, combining marks, control characters, special tokens, in any mix."""
    parts = st.one_of(
        st.text(max_size=12), st.text("0123456789", max_size=8), st.text(" \n\t\r\u00a0\u3000", max_size=6),
        st.text("aeiou\u0301\u0308\u0327ÅA\u030a", max_size=6), st.text("😀👩‍👧🇩🇪❤️🏽", max_size=6),
        st.text(st.characters(categories=["Cc", "Cf"]), max_size=4), st.sampled_from(EDGES))
    return st.lists(parts, max_size=6).map("".join)


def byte_level(pre: str, *, alphabet: bool = True) -> Tokenizer:
    """A byte-level BPE as the model families define it, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])
    elif pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    tokenizer.train_from_iterator(CORPUS, trainer)
    if pre == "llama-bpe":
        tokenizer.model.ignore_merges = True
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer


def sentencepiece_like(*, prefix: bool = True) -> tuple[Tokenizer, list[float]]:
    """A BPE with byte fallback in the manner of SentencePiece, and the score of each token (0 for raw bytes)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if prefix else [normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    base = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace("▁", "always"), pre_tokenizers.Digits(True)])
    learner.train_from_iterator(CORPUS[:2] + CORPUS[4:5], trainers.BpeTrainer(vocab_size=420, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = [a + b for a, b in learned["merges"]]
    letters = [token for token in learned["vocab"] if token not in set(pieces)]
    tokens = [*base, *dict.fromkeys(pieces), *letters]
    scores = [0.0] * len(base) + [-float(rank) for rank in range(len(tokens) - len(base))]
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = sorted(((vocab[token], cut) for token in dict.fromkeys(pieces) for cut in range(1, len(token))
                     if token[:cut] in vocab and token[cut:] in vocab),
                    key=lambda item: (item[0], vocab[tokens[item[0]][:item[1]]]))
    merges = [(tokens[index][:cut], tokens[index][cut:]) for index, cut in ranked]
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in base[:3]])
    return tokenizer, scores


def gguf_metadata(tokenizer: Tokenizer, pre: str, *, padding: int = 0) -> dict[str, Any]:
    """What converters write for a byte-level BPE; `padding` more unused entries at the end."""
    model = json.loads(tokenizer.to_str())
    vocab = {**model["model"]["vocab"], **{token["content"]: token["id"] for token in model["added_tokens"]}}
    special = {token["content"]: token["special"] for token in model["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [{True: 3, False: 4}.get(special.get(token), 1) for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{index}]" for index in range(padding)],
        "tokenizer.ggml.token_type": types + [5] * padding,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|im_start|>"], "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
    }


def sentencepiece_metadata(tokenizer: Tokenizer, scores: list[float], *, prefix: bool = True) -> dict[str, Any]:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def wordpiece(*, lowercase: bool) -> Tokenizer:
    """A WordPiece as BERT defines it, trained on a few lines."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(
        vocab_size=400, show_progress=False, special_tokens=special, continuing_subword_prefix="##"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.decoder = decoders.WordPiece("##")
    return tokenizer


def wordpiece_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    """What converters write: pieces that begin a word are marked, the others lose their mark."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    marked = [token.removeprefix("##") if token.startswith("##") else f"▁{token}" for token in tokens]
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens[:5] + marked[5:],
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(tokens) - 5), "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2, "tokenizer.ggml.seperator_token_id": 3, "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.mask_token_id": 4,
    }


def write_tokenizer(path: Path, metadata: dict[str, Any]) -> Path:
    return write_gguf(path, metadata=metadata)
