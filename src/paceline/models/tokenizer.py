"""Tokenizer: text to ids and back, with the ids that begin, end and steer a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import ContextLengthError, RequestError
from paceline.models.control_tokens import ControlTokens, encoded
from paceline.models.detokenizer import Detokenizer, TokenTable
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.gguf_checkpoint import GGUFCheckpoint
from paceline.models.load.gguf_config import token_id
from paceline.models.load.gguf_tokenizer import rebuild_tokenizer
from paceline.models.load.reading import is_panic, read_object, read_text, reading
from paceline.models.text_bounds import TextBound, text_bound

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls",
               "mask": "mask"}
"""As the format spells them, and as chat templates do."""


class Tokenizer:
    """A `tokenizers` object and what the model's files say about its special tokens. Safe to share between threads."""

    def __init__(self, backend: Backend, *, eos_ids: Iterable[int] = (), bos_id: int | None = None,
                 special_tokens: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        """Any of these ends a text."""
        self.bos_id = bos_id
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        """"bos_token" -> "<s>" and the like, as chat templates name them."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer | None:
        """None if the model has no tokenizer: it then takes and gives token ids only (see no_tokenizer)."""
        gguf = isinstance(checkpoint, GGUFCheckpoint)
        where = checkpoint.path if gguf else checkpoint.path / "tokenizer.json"
        with reading(where, "is not a tokenizer that can be used" if not gguf else "has no tokenizer that can be used"):
            found = cls._from_gguf(checkpoint) if isinstance(checkpoint, GGUFCheckpoint) \
                else cls._from_folder(checkpoint.path, checkpoint.config)
            if found is not None:
                found._try()
        return found

    def _try(self) -> None:
        """Whatever is made of its tables, and one text: what breaks a tokenizer had better do so when it is loaded."""
        self.control._written  # noqa: B018
        self.decode(self.encode("a 1"))

    @classmethod
    def _from_gguf(cls, checkpoint: GGUFCheckpoint) -> Tokenizer | None:
        file = checkpoint.file
        backend = rebuild_tokenizer(file)
        if backend is None:
            return None
        named, read = {}, file.metadata
        for role, name in _GGUF_ROLES.items():
            index = token_id(read, role)
            token = None if index is None else backend.id_to_token(index)
            if token is not None:
                named[f"{name}_token"] = token
        ends = (token_id(read, role) for role in ("eos", "eot", "eom"))
        return cls(backend, eos_ids=[end for end in ends if end is not None], bos_id=token_id(read, "bos"),
                   special_tokens=named)

    @classmethod
    def _from_folder(cls, folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        with reading(path, "is not a tokenizer that can be read"):
            backend = Backend.from_str(read_text(path))
        settings = {**_optional_json(folder / "special_tokens_map.json"),
                    **_optional_json(folder / "tokenizer_config.json")}
        named = {name: content for name in _NAMED if (content := _content(settings.get(name))) is not None}
        ends = [*named_ids(config.get("eos_token_id")),
                *named_ids(_optional_json(folder / "generation_config.json").get("eos_token_id"))]
        if "eos_token" in named:
            ends += named_ids(backend.token_to_id(named["eos_token"]))
        bos = named_ids(backend.token_to_id(named["bos_token"]) if "bos_token" in named else config.get("bos_token_id"))
        return cls(backend, eos_ids=ends, bos_id=bos[0] if bos else None, special_tokens=named)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`. `add_special`: with the begin (and end) tokens the model expects. `parse_special`: special
        tokens written out in the text become their ids; otherwise text is text."""
        with encoding():
            found = encoded(self.backend, text)
            if not parse_special and not self.special_ids.isdisjoint(found.ids):
                found = encoded(self.control.twin, text)
            return list(self.backend.post_process(found, add_special_tokens=add_special).ids)

    def check_length(self, text: str, most: int, param: str = "prompt") -> None:
        """Refuse a text that cannot have as few as `most` tokens, without looking at it: to tokenise a long one takes
        seconds. What would fit always passes (see text_bounds.py)."""
        bound = self._text_bound
        if bound is not None and not bound.holds(text, most):
            raise ContextLengthError.of(most, f"{len(text)} characters, and a token has at most {bound.each}",
                                        max(-(-len(text) // bound.each), most + 1), param)

    @cached_property
    def _text_bound(self) -> TextBound | None:
        return text_bound(self.backend)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        # A batch of one: the library lets other threads run meanwhile.
        return str(self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0])

    def detokenizer(self, skip_special: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """For the growing text of one sequence that goes on from the ids `after`."""
        return self.table.start(skip_special, after)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of `text` as it stands in the middle of another: without the space that some put before a text."""
        for before in ("", "\n", "a"):
            start, whole = (self.encode(one, add_special=False) for one in (before, before + text))
            ids = whole[len(start):]
            if whole[:len(start)] == start and self._bytes(ids) == text.encode():
                return ids
        return self.encode(text, add_special=False)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.token_bytes(token) or b"" for token in ids)

    @cached_property
    def control(self) -> ControlTokens:
        """The special tokens, for texts that are to have none."""
        return ControlTokens(self.backend, [self.table.tokens[token] or "" for token in self.special_ids])

    @cached_property
    def table(self) -> TokenTable:
        return TokenTable(self.backend)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id (there may be unused ids below it)."""
        return self.table.size

    @property
    def added_at_end(self) -> int:
        """How many of the highest ids are tokens that were added to the vocabulary."""
        added = self.backend.get_added_tokens_decoder()
        at = self.vocab_size
        while at - 1 in added:
            at -= 1
        return self.vocab_size - at

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that skip_special leaves out of a text."""
        return self.table.special

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes this id adds to a text; None for special tokens and for ids without a token."""
        return self.table.token_bytes(token_id)

    def fingerprint(self) -> str:
        """Equal for two tokenizers in which every id stands for the same token: one can draft for the other."""
        return self.table.fingerprint


@contextmanager
def encoding() -> Iterator[None]:
    """Errors for a text that no tokenizer takes, or that this model's gives up on."""
    try:
        yield
    except TypeError as error:
        raise RequestError("The text cannot be encoded: it must be a string without lone surrogates (half a "
                           "character); repair it where it is read.", "prompt") from error
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):  # which is what the library raises
            raise
        raise RequestError(f"The model's tokenizer cannot encode this text ({str(error)[:200]}): change the text, or "
                           "repair the model's tokenizer.", "prompt") from error


def no_tokenizer(path: Path) -> RequestError:
    """The error for text given to a model without a tokenizer."""
    return RequestError(f"The model {path} has no tokenizer.json, so it takes token ids only: pass a list of ids as "
                        "the prompt, or put the model's tokenizer.json into its folder.", "prompt")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def named_ids(value: Any) -> list[int]:
    """Ids come as a number, a list or not at all."""
    return [found for found in (value if isinstance(value, list) else [value])
            if isinstance(found, int) and not isinstance(found, bool)]
