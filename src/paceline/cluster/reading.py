"""FrontModel: the model as a front has it, its files without the weights: what makes requests of clients' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine.admission import Prepared, check_params, check_prompt
from paceline.engine.core import Engine
from paceline.engine.exchange import FACTS
from paceline.engine.records.emitter import StopCriteria
from paceline.engine.structures import Structures
from paceline.errors import ConfigError, RequestError
from paceline.hub.cache import Progress
from paceline.models.chat import ChatEncoder, ChatTemplate
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.tokenizer import Tokenizer
from paceline.request import SamplingParams
from paceline.sampling.state import SampleState, tokenise_bad_words
from paceline.speculation.spec import Speculation


class Kernels(NamedTuple):
    name: str


class AdapterNames(NamedTuple):
    revisions: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        return list(self.revisions)


class Identity(NamedTuple):
    """What must agree in all processes, or they would write different texts."""

    version: str
    revision: str
    """Of the model's files."""


@dataclass(frozen=True)
class Facts:
    """What a front hears of an engine that it does not have."""

    identity: Identity
    config: EngineConfig
    vocab_size: int
    eos_ids: frozenset[int]
    speculation: Speculation | None
    kernels: str
    adapters: Mapping[str, str]
    """Their revisions, by name."""
    blocks: Mapping[str, str]
    """What decides the bits that its cache holds: those with the same can hand blocks to each other."""

    @classmethod
    def of(cls, engine: Engine) -> Facts:
        return cls(Identity(__version__, engine.revision), engine.config, engine.model.config.vocab_size,
                   engine.eos_ids, engine.speculation, engine.kernels.name,
                   {name: adapter.revision for name in engine.adapters.names
                    if (adapter := engine.adapters.get(name)) is not None},
                   {"block_size": str(engine.config.block_size),
                    **{name: str(getattr(engine.setup, name)) for name in FACTS}})


@dataclass(frozen=True)
class ModelTexts:
    """Of a model's files: how it spells. Read before any replica starts, so that a wrong name costs no more."""

    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    revision: str

    @classmethod
    def read(cls, model: str | None, progress: Progress | None = None, chat_template: str | None = None) -> ModelTexts:
        with open_checkpoint(resolve(model, progress=progress)) as checkpoint:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            return cls(tokenizer, ChatTemplate.of(checkpoint, tokenizer, chat_template), checkpoint.revision)


class FrontModel:
    """A ServedModel whose weights are elsewhere."""

    def __init__(self, texts: ModelTexts, facts: Facts) -> None:
        check_identity(Identity(__version__, texts.revision), facts.identity)
        self.tokenizer = texts.tokenizer
        self.chat = texts.chat
        self.facts = facts
        self.config = facts.config
        self.revision = texts.revision
        self.speculation = facts.speculation
        self.adapters = AdapterNames(facts.adapters)
        self.kernels = Kernels(facts.kernels)
        self._structures = Structures(texts.tokenizer, facts.vocab_size, facts.eos_ids, lambda: 0.0)
        self._encoder = ChatEncoder(texts.chat, texts.tokenizer) if texts.chat and texts.tokenizer else None
        if self.tokenizer is not None:
            self.tokenizer.check_length("", 0)  # made now and not while somebody waits

    def render(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False,
               max_prompt_len: int | None = None, **template: Any) -> list[int]:
        if self._encoder is None:
            raise RequestError("This model came without a chat template or tokenizer: give a prompt to generate() "
                               "instead.", "messages")
        return self._encoder.encode(messages, parse_special=parse_special, max_prompt_len=max_prompt_len, **template)

    def prepare(self, prompt: str | list[int], params: SamplingParams, like: Prepared | None = None) -> Prepared:
        """Everything that can be refused is, before it is sent anywhere."""
        check_params(params)
        facts = self.facts
        ids = check_prompt(prompt, params, self.tokenizer, facts.vocab_size, self.config.max_model_len)
        if like is not None:
            structure, bad_words, stops = like.structure, like.bad_words, like.stops
        else:
            structure = self._structures.wanted(params)
            bad_words = tokenise_bad_words(params.bad_words, self._spell) if params.bad_words else []
            stops = StopCriteria.of(params, facts.eos_ids)
        state = SampleState(params, ids, 0, facts.vocab_size, facts.eos_ids, bad_words)
        return Prepared(prompt if isinstance(prompt, str) else None, ids, params, state, stops, structure, bad_words)

    def _spell(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer and this model came without one; "
                               "use logit_bias with token ids instead.", "bad_words")
        return self.tokenizer.encode_inside(text)


def check_identity(own: Identity, other: Identity) -> None:
    if own.version != other.version:
        raise ConfigError(f"The front is Paceline {own.version} and a replica is {other.version}: install the same "
                          "version on every node.")
    if own.revision != other.revision:
        raise ConfigError(f"The front has revision {own.revision[:16]} of the model and a replica has "
                          f"{other.revision[:16]}: give every node the same files.")


def check_blocks(prefill: Facts, decode: Facts) -> None:
    """Whether one can hand to the other what it computed of a prompt."""
    for name, own in prefill.blocks.items():
        if (other := decode.blocks.get(name)) != own:
            raise ConfigError(f"A prefill worker has {name}={own} and a decode worker {name}={other}, so no block of "
                              "the one is of use to the other: run both on machines of one kind, with the same "
                              "software, or serve with --replicas.")
