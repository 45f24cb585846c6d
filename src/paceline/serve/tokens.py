"""Tokens as responses show them: text, bytes, log-probabilities, origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.engine.records.deltas import SampleDelta
from paceline.models.tokenizer import Tokenizer
from paceline.request import Completion, RequestOutput, TokenLogprob
from paceline.speculation.stats import Provenance

LEAST = -9999.0
"""JSON has no infinity; OpenAI writes this for it."""
PLAIN = Provenance("plain")


class TokenNames:
    """What single tokens look like; without a tokenizer, their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        if self._tokenizer is None:
            return str(token).encode()
        found = self._tokenizer.token_bytes(token)
        if found is None:  # a special token, or an id without one
            found = str(self._tokenizer.backend.id_to_token(token) or "").encode()
        return found

    def text(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")


def bounded(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_logprobs(scores: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = names.bytes_of(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": bounded(logprob), "bytes": list(raw)}

    return {"content": [entry(score.token, score.raw) | {
        "top_logprobs": [entry(token, value) for token, value in score.top.items()]} for score in scores],
        "refusal": None}


def llama_logprobs(scores: Sequence[TokenLogprob], names: TokenNames) -> list[dict[str, Any]]:
    """As llama.cpp tells them, which names ids too."""
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = names.bytes_of(token)
        return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": bounded(logprob)}

    return [entry(score.token, score.raw) | {"top_logprobs": [entry(token, value) for token, value in
                                                              score.top.items()]} for score in scores]


def prompt_logprobs(output: RequestOutput, asked: int | None, names: TokenNames) -> dict[str, Any]:
    """As vLLM tells them: of each token of the prompt, the token itself and the likeliest, by their ids."""
    if asked is None:
        return {}

    def entries(score: TokenLogprob) -> dict[str, Any]:
        ranked = {token: (rank, value) for rank, (token, value) in enumerate(score.top.items(), 1) if rank <= asked}
        return {str(token): {"logprob": bounded(value), "rank": rank, "decoded_token": names.text(token)}
                for token, (rank, value) in ({score.token: (score.rank, score.raw)} | ranked).items()}

    return {"prompt_logprobs": [None if score is None else entries(score) for score in output.prompt_logprobs or ()]}


class CompletionLogprobs:
    """The older format, which says where in the text each token begins. One a sample: offsets go on."""

    def __init__(self, names: TokenNames, offset: int = 0) -> None:
        self._names = names
        self._offset = offset

    def format(self, scores: Sequence[TokenLogprob | None], tokens: Sequence[int]) -> dict[str, Any]:
        """A score is None where there is none: the first token of a prompt."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in zip(tokens, scores):
            text = self._names.text(token)
            out["tokens"].append(text)
            out["token_logprobs"].append(None if score is None else bounded(score.raw))
            out["top_logprobs"].append(None if score is None else {
                self._names.text(other): bounded(value) for other, value in score.top.items()})
            out["text_offset"].append(self._offset)
            self._offset += len(text)
        return out


class Provenances:
    """Says of each token of one sample what it added to the text, who proposed it and what else it might have been."""

    def __init__(self, tokenizer: Tokenizer | None, names: TokenNames, prompt: Sequence[int]) -> None:
        self._stream = None if tokenizer is None else tokenizer.detokenizer(after=prompt)
        self._names = names

    def of_delta(self, delta: SampleDelta, drafted: bool) -> list[dict[str, Any]]:
        """`drafted`: the request speculates. Origins are kept of the first sample only."""
        return list(self._entries(delta.token_ids, delta.logprobs, delta.origins, drafted))

    def of_completion(self, completion: Completion, origins: Sequence[Provenance] | None,
                      drafted: bool) -> list[dict[str, Any]]:
        return list(self._entries(completion.token_ids, completion.logprobs, origins, drafted))

    def _entries(self, tokens: Sequence[int], scores: Sequence[TokenLogprob] | None,
                 origins: Sequence[Provenance] | None, drafted: bool) -> Iterator[dict[str, Any]]:
        for place, token in enumerate(tokens):
            score = None if scores is None else scores[place]
            origin = None if drafted else PLAIN
            if origins is not None and place < len(origins):
                origin = origins[place]
            yield {"id": token, "text": "" if self._stream is None else self._stream.push(token),
                   "origin": None if origin is None else origin.outcome,
                   "drafter": None if origin is None else origin.drafter,
                   "logprob": None if score is None else bounded(score.raw),
                   "top": [] if score is None else [
                       {"id": other, "text": self._names.text(other), "logprob": bounded(value)}
                       for other, value in score.top.items()]}
