"""Control tokens: what steers a model (<|im_end|>), kept apart from texts in which somebody wrote its name."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import quote

from tokenizers import Tokenizer as Backend

LONGEST_NAME = 200
"""Characters of a control token's name. All its beginnings and ends are kept, and a pattern is as deep as it is."""


def encoded(backend: Backend, text: str) -> Any:
    """The `tokenizers` encoding of a text, without special tokens. As a batch of one: the library then lets other
    threads run meanwhile, and a long text takes seconds."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0]


class ControlTokens:
    """Reads texts in which the names of control tokens are text like any other, by a twin of the tokenizer: there
    control tokens have names that nobody can guess, and all else is the same. It is made when a text first needs it."""

    def __init__(self, backend: Backend, names: Iterable[str]) -> None:
        self._backend = backend
        self.names = frozenset(name for name in names if len(name) > 1)
        if any(len(name) > LONGEST_NAME for name in self.names):
            raise ValueError(f"a special token's name has more than {LONGEST_NAME} characters")
        self._mark = chr(0x100000 + secrets.randbelow(0xFFF0))
        """Put into a name that somebody wrote, it is none any more. A character for private use: no template strips it
        or has another case for it, and nobody has it in a text."""
        self._nonce = secrets.token_hex(16)  # made here: what is made on first use may be made by two threads at once
        self._begins = frozenset(name[:end] for name in self.names for end in range(1, len(name)))
        self._ends = frozenset(name[start:] for name in self.names for start in range(1, len(name)))
        self._longest = max(map(len, self.names), default=0)

    # -- texts within a text that has control tokens of its own ------------------------------------------------------

    def guard(self, value: Any) -> Any:
        """`value`, with marks in its strings, however deep they lie, wherever they or what they are put between could
        make the name of a control token. The same object where there are none."""
        if isinstance(value, str):
            return self._guarded(value)
        if isinstance(value, Mapping):
            pairs = {self.guard(key): self.guard(one) for key, one in value.items()}
            same = all(key is old and one is value[old] for old, (key, one) in zip(value, pairs.items()))
            return value if same else pairs
        if isinstance(value, list | tuple):
            items = [self.guard(one) for one in value]
            return value if all(one is old for one, old in zip(items, value)) else items
        return value

    def encode_guarded(self, text: str) -> list[int]:
        """Ids of a text made of guarded strings and others: control tokens are those of the others."""
        plain, names = self.unmarked(text), self._written.findall(text)
        if self._written.findall(plain) == names:  # nothing came of it, as mostly
            ids = list(encoded(self._backend, plain).ids)
            if sum(map(self._ids.__contains__, ids)) <= len(names):  # else normalising made names of other letters
                return ids
        secret = self._written.sub(lambda found: self._secret[found[0]], text)
        return list(encoded(self.twin, self.unmarked(secret)).ids)

    def unmarked(self, text: str) -> str:
        """A text made of guarded strings as it would be without the guard, unless somebody looked at them."""
        for spelled in self._spellings:
            text = text.replace(spelled, "")
        return text

    @cached_property
    def _spellings(self) -> tuple[str, ...]:
        """Of the mark: as it is, and as templates write it that put JSON, Python's own notation or an address around a
        string."""
        return self._mark, json.dumps(self._mark)[1:-1], repr(self._mark)[1:-1], quote(self._mark)

    def _guarded(self, text: str) -> str:
        cuts = sorted({*self._cuts(text)})
        return self._mark.join(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])) if cuts else text

    def _cuts(self, text: str) -> Iterator[int]:
        """Where marks belong: into every name, and where a name may begin before the text or end after it. Templates
        may strip a text, so what counts is what then begins and ends it."""
        at = 0
        while (found := self._written.search(text, at)) is not None:
            at = found.start() + 1
            yield at
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in range(1, min(self._longest, end - start + 1)):
            if text[start:start + size] in self._ends:
                yield start
            if text[end - size:end] in self._begins:
                yield end - size + 1

    @cached_property
    def _ids(self) -> frozenset[int | None]:
        return frozenset(map(self._backend.token_to_id, self.names))

    @cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(_any_of(sorted(self.names)) if self.names else r"(?!)")

    # -- the twin ----------------------------------------------------------------------------------------------------

    @cached_property
    def _secret(self) -> dict[str, str]:
        return {name: f"<{self._nonce}-{index}>" for index, name in enumerate(sorted(self.names))}

    @cached_property
    def twin(self) -> Backend:
        """The tokenizer with secret names for control tokens: it finds none in a text that somebody wrote."""
        state, secret = json.loads(self._backend.to_str()), self._secret
        state["post_processor"] = None
        for token in state["added_tokens"]:
            if token["content"] in secret:
                token |= {"content": secret[token["content"]], "single_word": False}
        model = state["model"]
        if isinstance(model["vocab"], list):  # Unigram: pieces with scores
            model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
        else:
            model["vocab"] = {secret.get(piece, piece): index for piece, index in model["vocab"].items()}
        if model.get("unk_token") in secret:
            model["unk_token"] = secret[model["unk_token"]]
        if "merges" in model:  # converted vocabularies may merge pieces to a control token
            pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
            model["merges"] = [pair for pair in pairs if secret.keys().isdisjoint((*pair, "".join(pair)))]
        return Backend.from_str(json.dumps(state))


def _any_of(words: list[str]) -> str:
    """A pattern for the longest of these sorted words: a tree by their letters, since there may be thousands."""
    branches: list[str] = [re.escape(first) + _any_of([word[1:] for word in group])
                           for first, group in groupby(filter(None, words), itemgetter(0))]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")
