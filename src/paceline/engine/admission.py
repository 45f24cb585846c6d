"""What is checked before a request enters the engine. Each refusal says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.engine.records.emitter import Emitter, StopCriteria, TextStream
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.errors import ContextLengthError, RequestError
from paceline.grammar.structure import Structure
from paceline.models.tokenizer import Tokenizer
from paceline.request import SamplingParams
from paceline.sampling.noise import sample_seed
from paceline.sampling.state import SampleState
from paceline.so_far import Past

NEW = Past()
"""That of a request which no engine had before."""
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class BegunSample:
    """A sample that has said something elsewhere: what it remembers of that, and its text."""

    state: SampleState
    emitter: Emitter

    @property
    def said(self) -> list[int] | None:
        """Its output so far; None: it has ended with that."""
        return self.emitter.token_ids if self.emitter.finish_reason is None else None


def begun_samples(params: SamplingParams, state: SampleState, stops: StopCriteria, past: Past,
                  text_stream: Callable[[], TextStream | None]) -> tuple[BegunSample, ...]:
    """Read what samples have said elsewhere. Takes time by the length of that: not in the engine's thread."""
    if not past.so_far:
        return ()
    if params.chosen_at_end:
        raise RequestError("A request that chooses among texts at the end has said nothing yet: let it start over.")
    if params.seed is None or len(past.so_far) != params.samples:
        raise RequestError("A request goes on elsewhere with its seed and with what each of its samples has said.")
    begun = []
    for index, so_far in enumerate(past.so_far):
        if so_far.token_ids and not 0 <= min(so_far.token_ids) <= max(so_far.token_ids) < state.vocab_size:
            raise RequestError("What the request has said elsewhere holds tokens that this model does not have: all "
                               "workers must have the same model.")
        own = state.fork(sample_seed(params.seed, index))
        own.append(so_far.token_ids)
        emitter = Emitter(params, index, own.seed, ENDLESS, text_stream(), stops)
        emitter.take_over(so_far)
        begun.append(BegunSample(own, emitter))
    return tuple(begun)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt and parameters that are valid, and what all samples start from: made in any thread, before the engine
    hears of the request. Everybody waits for what the engine's own thread does."""

    text: str | None
    """The prompt, where it was a text."""
    ids: list[int]
    params: SamplingParams
    state: SampleState
    stops: StopCriteria
    structure: Structure | None
    """To be compiled before it may run."""
    bad_words: list[tuple[int, ...]]
    """As tokens."""
    past: Past = NEW
    begun: tuple[BegunSample, ...] = ()
    """Where its samples have said something elsewhere: one each, ready to go on."""


def start(seq: Sequence, prepared: Prepared, text_stream: Callable[[], TextStream | None]) -> None:
    """Give a sequence what it remembers and its text: new ones, or those that it comes with."""
    room = seq.limit - seq.prompt_len
    if not prepared.begun:
        seq.state = prepared.state.fork(seq.seed)
        seq.emitter = Emitter(prepared.params, seq.sample, seq.seed, room, text_stream(), prepared.stops)
        return
    begun = prepared.begun[seq.sample]
    seq.state, seq.emitter = begun.state, begun.emitter
    seq.emitter.max_tokens = room
    if seq.status is Status.FINISHED:
        seq.emitter.finish("length")  # unless it has ended for a reason of its own


def check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {type(params).__name__}: write "
                           "SamplingParams(max_tokens=...).", "params")


def check_streamed(params: SamplingParams) -> None:
    """What is streamed while it grows must be part of what is returned in the end."""
    check_params(params)
    if params.chosen_at_end:
        name = "beam_width" if params.searches else "best_of"
        raise RequestError(f"A request with {name} cannot be streamed: what it returns is chosen when all texts have "
                           "ended; ask for the whole answer.", "stream")


def check_search(params: SamplingParams, vocab_size: int, max_num_seqs: int, *, speculates: bool) -> None:
    """What a beam search needs of the engine. The beams of one search run side by side."""
    most = min(vocab_size, max_num_seqs)
    if params.beam_width > most:
        what = "tokens in the vocabulary" if vocab_size < max_num_seqs else "sequences side by side (max_num_seqs)"
        raise RequestError(f"beam_width is {params.beam_width} and this engine has {most} {what}: ask for fewer beams.",
                           "beam_width")
    if speculates:
        raise RequestError("Beam search does not speculate: leave speculation out or set it to None.", "speculation")


def check_prompt(prompt: str | list[int], params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int,
                 max_model_len: int) -> list[int]:
    """The prompt as token ids that fit the model and the context."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("This model came without a tokenizer: give the prompt as a list of token ids.",
                               "prompt")
        if not prompt:
            raise RequestError("The prompt is empty: give at least one character or token.", "prompt")
        tokenizer.check_length(prompt, max_model_len)
        ids = tokenizer.encode(prompt, parse_special=params.parse_special)
    elif isinstance(prompt, bytes | bytearray):
        raise RequestError("A prompt is a string or a list of token ids, not bytes: decode it first.", "prompt")
    elif isinstance(prompt, Iterable):
        ids = list(prompt)
    else:
        raise RequestError(f"A prompt is a string or a list of token ids, got {type(prompt).__name__}.", "prompt")
    if not ids:
        raise RequestError("The prompt is empty: give at least one token.", "prompt")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size:  # quick; then who it is
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(f"Token id {token!r} in the prompt is out of range: the vocabulary has ids 0 to "
                                   f"{vocab_size - 1}.", "prompt")
    longest = max_model_len if params.max_tokens == 0 else max_model_len - 1
    if len(ids) > longest:
        raise ContextLengthError.of(max_model_len, f"{len(ids)} tokens, {len(ids) - longest} too many" + (
            "" if longest == max_model_len else " beside one for the answer"), len(ids))
    return ids
