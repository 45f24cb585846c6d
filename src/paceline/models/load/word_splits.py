"""How byte-level vocabularies cut a text into words before merging, by the name GGUF files give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|" + _SPACES

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}"
          r"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + _SPACES)
"""Capitals begin a word."""


def _characters(ranges: str) -> str:
    """Hexadecimal code points and ranges of them, as the inside of a character class."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_HAN = f"[{_characters('4E00-9FA5 0800-4E00 AC00-D7FF')}]+"
_HAN_AND_KANA = f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_MARKS = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_CASED_LETTERS = _characters(  # of scripts with two cases, as DeepSeek listed them
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943")
_PUNCTUATED = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
               r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES)


@dataclass(frozen=True, slots=True)
class WordSplit:
    """`patterns`: each one cuts out its matches from what the ones before it left together."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    """Cut as GPT-2 does afterwards."""
    nfc: bool = False
    """Characters are composed first."""
    whole_words: bool = False
    """A word that is in the vocabulary is one token, whatever the merges say."""
    begins: bool = False
    """Texts get a begin token where the file does not say."""

    def pre_tokenizer(self) -> Any:
        """A `tokenizers` pre-tokenizer; its words are in the characters that stand for bytes."""
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([
            *steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])

    def normalizer(self) -> Any:
        """None: texts are taken as they are."""
        return normalizers.NFC() if self.nfc else None


_GPT2, _GPT2_NFC = WordSplit(gpt2=True), WordSplit(gpt2=True, nfc=True)
_DIGITS = WordSplit((r"\p{N}",), gpt2=True)
_LLAMA3 = WordSplit((_WORDS.format(digits="{1,3}"),), whole_words=True, begins=True)
_CL100K = WordSplit((_WORDS.format(digits="{1,3}"),))
_QWEN2 = WordSplit((_WORDS.format(digits=""),), nfc=True)
_QWEN2_PLAIN = WordSplit((_WORDS.format(digits=""),))
_O200K = WordSplit((_CASED.format(upper=_UPPER, lower=_LOWER, endings=_ENDINGS + "?", digits="{1,3}"),))

WORD_SPLITS: dict[str, WordSplit] = {
    "default": _GPT2, "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2_NFC, "olmo": _GPT2_NFC,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS,
    "command-r": WordSplit((r"\p{N}",), gpt2=True, nfc=True),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3, "pixtral": _LLAMA3, "midm-2.0": _LLAMA3, "lfm2": _LLAMA3,
    "dbrx": _CL100K, "smaug-bpe": _CL100K, "glm4": _CL100K, "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2_PLAIN, "stablelm2": _QWEN2_PLAIN, "megrez": _QWEN2_PLAIN,
    "gpt-4o": _O200K, "llama4": _O200K,
    "tekken": WordSplit((_CASED.format(upper=_UPPER, lower=_LOWER, endings="", digits=""),), whole_words=True,
                        begins=True),
    "deepseek-llm": WordSplit((r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_MARKS}]+", r"\s+$", _HAN,
                               r"\p{N}")),
    "deepseek-coder": WordSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": WordSplit((r"\p{N}{1,3}", _HAN_AND_KANA, _PUNCTUATED)),
}
"""tokenizer.ggml.pre -> how it cuts. Files do not say whether characters are composed first (NFC): it is so for Qwen2,
GPT-NeoX's vocabulary (mpt, olmo) and Cohere's, as in transformers' classes for them, and assumed not to be else."""
