"""Tokens to text, one at a time: at most a list lookup for an ordinary token, never half a character.

The text of all push() and the flush() together is what the tokenizer's decode() gives for all ids at once. Of a
sequence that goes on from others it is what its ids add to their text: no space is taken off its beginning, and half a
character at their end is completed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
UNMAPPED = "\U0010ffff"
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
_HALF = 3
"""Half a character has at most so many bytes, so it lies in at most so many tokens."""
_MOST_SPARSE = 1 << 20
"""Ids that a vocabulary may have whatever the number of its tokens; of larger ones a quarter is used."""
_REMEMBERED = 16
"""Tokens before a text that an opaque decoder is shown: all that any is known to look back at."""


class _Decoder(NamedTuple):
    """What a `tokenizers` decoder does, as far as it is understood here."""

    kind: str
    byte_tokens: bool = False
    """Tokens like <0x0A> stand for one raw byte."""
    strip: int = 0
    """Spaces taken off the beginning of the text."""
    first_drops: bool = False
    """The first token loses every ▁ instead of having it turned into a space."""


class TokenTable:
    """What every token id stands for, shared by all sequences. Built once per tokenizer, then only read.

    `backend` is a tokenizers.Tokenizer; its decoder decides how ids become text:
    - "bytes": a token is a string of bytes (byte-level BPE),
    - "pieces": a token is text or one raw byte (SentencePiece with byte fallback, Metaspace),
    - "words": a token is a word or goes on with one (WordPiece), and the first one gets no space before it,
    - "opaque": anything else; only the backend itself can decode.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        by_id = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        by_id.update((token_id, token.content) for token_id, token in added.items())
        self.size = max(by_id, default=-1) + 1
        """One more than the highest id."""
        if self.size > max(_MOST_SPARSE, 4 * len(by_id)):
            raise ValueError(f"its {len(by_id):,} tokens have ids up to {self.size - 1:,}")
        self.tokens: list[str | None] = [by_id.get(token_id) for token_id in range(self.size)]
        self.special: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decoder = _read_decoder(backend.decoder)
        self.kind = self.decoder.kind

    # -- byte-level ------------------------------------------------------------------------------------------------

    @cached_property
    def raw(self) -> list[bytes]:
        """Bytes of each id in a "bytes" table; b"" for ids without a token."""
        to_latin = str.maketrans(latin_of_byte_characters())
        return [b"" if token is None else _byte_level(token, to_latin) for token in self.tokens]

    @cached_property
    def texts(self) -> list[str | None]:
        """The text of each id in a "bytes" table, None where its bytes are not whole characters."""
        return [_whole_text(data) for data in self.raw]

    @cached_property
    def shown_raw(self) -> list[bytes]:
        """`raw` with special tokens left out."""
        return [b"" if token_id in self.special else data for token_id, data in enumerate(self.raw)]

    @cached_property
    def shown_texts(self) -> list[str | None]:
        """`texts` with special tokens left out."""
        return ["" if token_id in self.special else text for token_id, text in enumerate(self.texts)]

    # -- pieces ----------------------------------------------------------------------------------------------------

    @cached_property
    def pieces(self) -> list[str | int | None]:
        """Text of each id in a "pieces" table, or the raw byte it stands for; None for ids without a token."""
        return [None if token is None else self._piece(token) for token in self.tokens]

    @cached_property
    def shown_pieces(self) -> list[str | int | None]:
        """`pieces` with special tokens left out."""
        return [None if token_id in self.special else piece for token_id, piece in enumerate(self.pieces)]

    def _piece(self, token: str) -> str | int:
        byte = _BYTE_TOKEN.fullmatch(token) if self.decoder.byte_tokens else None
        return int(byte.group(1), 16) if byte else token.replace("▁", " ")

    # -- words -----------------------------------------------------------------------------------------------------

    @cached_property
    def words(self) -> list[tuple[str, str] | None]:
        """Text of each id in a "words" table: at the beginning, and after other tokens; None for ids without one."""
        decode = self.backend.decoder.decode
        return [None if token is None else (str(decode([token])), str(decode(["x", token]))[1:])
                for token in self.tokens]

    @cached_property
    def shown_words(self) -> list[tuple[str, str] | None]:
        """`words` with special tokens left out."""
        return [None if token_id in self.special else word for token_id, word in enumerate(self.words)]

    # -- for others ------------------------------------------------------------------------------------------------

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes this id adds to a text; None for special tokens and ids without a token."""
        if not 0 <= token_id < self.size or self.tokens[token_id] is None or token_id in self.special:
            return None
        if self.kind == "bytes":
            return self.raw[token_id]
        if self.kind == "pieces":
            piece = self.pieces[token_id]
            return bytes([piece]) if isinstance(piece, int) else str(piece).encode()
        if self.kind == "words":
            word = self.words[token_id]
            return None if word is None else word[1].encode()
        return str(self.backend.decode([token_id])).encode()

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers in which every id stands for the same token and the same ids are special."""
        digest = hashlib.sha256(self.kind.encode())
        for token_id, token in enumerate(self.tokens):
            mark = b"\x00" if token is None else b"\x02" if token_id in self.special else b"\x01"
            data = (token or "").encode()
            digest.update(mark + len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()[:32]

    def start(self, skip_special: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """A detokeniser for a new sequence that goes on from the ids `after`."""
        if self.kind == "bytes":
            return _ByteDetokenizer(self, skip_special, after)
        if self.kind == "pieces":
            return _PieceDetokenizer(self, skip_special, after)
        if self.kind == "words":
            return _WordDetokenizer(self, skip_special, after)
        return _OpaqueDetokenizer(self, skip_special, after)


class Detokenizer(ABC):
    """Text of one growing sequence. Ids that no token has (padding rows of the embedding) add nothing."""

    __slots__ = ()

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; '' while the characters it begins are still incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """The rest at the end of the sequence, with U+FFFD for what stayed incomplete. No push() after it."""

    def extend(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.push, token_ids))


class _ByteDetokenizer(Detokenizer):
    __slots__ = ("_decoder", "_held", "_raw", "_texts")

    def __init__(self, table: TokenTable, skip_special: bool, after: Sequence[int]) -> None:
        self._texts = table.shown_texts if skip_special else table.texts
        self._raw = table.shown_raw if skip_special else table.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = False
        self.extend(after[-_HALF:])

    def push(self, token_id: int) -> str:
        try:
            if not self._held:
                text = self._texts[token_id]
                if text is not None:
                    return text
            text = self._decoder.decode(self._raw[token_id])
        except IndexError:
            return ""
        self._held = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._held = False
        return self._decoder.decode(b"", final=True)


class _PieceDetokenizer(Detokenizer):
    """A run of byte tokens is held until it ends: the decoder replaces ALL of a run that is not valid UTF-8, so no
    character of it is certain earlier."""

    __slots__ = ("_drop_first", "_pieces", "_run", "_strip", "_table")

    def __init__(self, table: TokenTable, skip_special: bool, after: Sequence[int]) -> None:
        self._table = table
        self._pieces = table.shown_pieces if skip_special else table.pieces
        self._run = bytearray()
        self._strip = 0 if after else table.decoder.strip
        self._drop_first = table.decoder.first_drops and not after
        self.extend(after[-_HALF:])
        self._run = bytearray(_half(self._run))

    def push(self, token_id: int) -> str:
        try:
            piece = self._pieces[token_id]
        except IndexError:
            return ""
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._drop_first:
            self._drop_first = False
            return (self._table.tokens[token_id] or "").replace("▁", "")
        if not self._run and not self._strip:
            return piece
        return self._emit(self._end_run() + piece)

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _emit(self, text: str) -> str:
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text

    def flush(self) -> str:
        return self._emit(self._end_run())


class _WordDetokenizer(Detokenizer):
    __slots__ = ("_begun", "_words")

    def __init__(self, table: TokenTable, skip_special: bool, after: Sequence[int]) -> None:
        self._words = table.shown_words if skip_special else table.words
        self._begun = bool(after)

    def push(self, token_id: int) -> str:
        try:
            word = self._words[token_id]
        except IndexError:
            return ""
        if word is None:
            return ""
        text = word[self._begun]
        self._begun = True
        return text

    def flush(self) -> str:
        return ""


class _OpaqueDetokenizer(Detokenizer):
    """Decodes the whole sequence again for each token: slow, right for every decoder whose text only grows."""

    __slots__ = ("_decode", "_ids", "_sent", "_skip")

    def __init__(self, table: TokenTable, skip_special: bool, after: Sequence[int]) -> None:
        self._decode = table.backend.decode
        self._skip = skip_special
        self._ids: list[int] = list(after[-_REMEMBERED:])
        self._sent = len(str(self._decode(self._ids, skip_special_tokens=skip_special)).rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        whole = str(self._decode(self._ids, skip_special_tokens=self._skip))
        return self._send(whole.rstrip(REPLACEMENT))

    def flush(self) -> str:
        return self._send(str(self._decode(self._ids, skip_special_tokens=self._skip)))

    def _send(self, text: str) -> str:
        new = text[self._sent:]
        self._sent = max(self._sent, len(text))
        return new


def _read_decoder(decoder: Any) -> _Decoder:
    if decoder is None:
        return _Decoder("opaque")
    steps = [json.loads(decoder.__getstate__())]
    if steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return _Decoder("bytes")
    if types == ["WordPiece"]:
        return _Decoder("words")
    if types == ["Metaspace"] and steps[0].get("replacement") == "▁":
        return _Decoder("pieces", first_drops=steps[0].get("prepend_scheme", "always") != "never")
    if types[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "▁"} \
            and steps[0]["content"] == " ":
        rest = steps[3:]
        if not rest:
            return _Decoder("pieces", byte_tokens=True)
        if len(rest) == 1 and rest[0]["type"] == "Strip" and rest[0]["content"] == " " and rest[0]["stop"] == 0:
            return _Decoder("pieces", byte_tokens=True, strip=int(rest[0]["start"]))
    return _Decoder("opaque")


def latin_of_byte_characters() -> dict[str, str]:
    """Byte-level vocabularies write each byte as a printable character: itself where it is one, else the next free
    one from U+0100. Here: that character -> the Latin-1 character of the byte; all other Latin-1 -> unmapped."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(code): UNMAPPED for code in range(0x100)}
    shift = 0
    for byte in range(0x100):
        if byte in printable:
            table[chr(byte)] = chr(byte)
        else:
            table[chr(0x100 + shift)] = chr(byte)
            shift += 1
    return table


def _byte_level(token: str, to_latin: dict[int, str]) -> bytes:
    """A token with any character outside the byte alphabet (an added token with a space) stands for itself."""
    try:
        return token.translate(to_latin).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _half(data: bytes | bytearray) -> bytes:
    """The bytes at the end that begin a character and do not end it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(data))
    return decoder.getstate()[0]


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
