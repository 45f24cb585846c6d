"""A tokenizer that was really trained, on little text, and engines of random weights around it."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.tiny import tiny_model
from paceline.bench.schemas import SCHEMAS
from paceline.config import EngineOptions
from paceline.engine.build import engine_for
from paceline.engine.structures import Structures
from paceline.grammar.states import CompiledGrammar
from paceline.grammar.structure import structure_of
from paceline.llm import LLM
from paceline.models.tokenizer import Tokenizer
from paceline.request import SamplingParams

END, BEGIN, TOOL = "<|end|>", "<|begin|>", "<|tool|>"
PADDED = 700
"""The model's vocabulary: some ids have no token, as in models whose embedding is rounded up."""
PROMPT = "A person as JSON:"


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE, some 600 tokens, three of them special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[END, BEGIN, TOOL], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    text = [json.dumps(schema, indent=2, ensure_ascii=False) for schema in SCHEMAS.values()]
    text += [json.dumps({"name": "Ada", "age": 36, "tags": ["yes", "no", "true"]})] * 20 + ["a b c d 0 1 2 3"] * 5
    backend.train_from_iterator(text, trainer)
    return Tokenizer(backend, eos_ids=[backend.token_to_id(END)], special_tokens={"eos_token": END})


def token(text: str) -> int:
    """The id of one token by its name."""
    found = tokenizer().backend.token_to_id(text)
    assert found is not None
    return int(found)


@functools.cache
def model() -> Any:
    return tiny_model("llama", vocab_size=PADDED, max_position_embeddings=4096)


def structured_llm(**options: Any) -> LLM:
    options = {"deterministic": True, "kv_blocks": 4000, "block_size": 8, "max_num_seqs": 80} | options
    engine = engine_for(model(), tokenizer(), EngineOptions.of(**options), device=torch.device("cpu"), revision="tiny",
                        eos_ids=tokenizer().eos_ids)
    return LLM.from_engine(engine)


@functools.cache
def _structures() -> Structures:
    return Structures(tokenizer(), PADDED, tokenizer().eos_ids, lambda: 0.0)


def compiled(**structure: Any) -> CompiledGrammar:
    """A grammar without an engine."""
    found = structure_of(SamplingParams(**structure))
    assert found is not None
    return _structures().compiler.compile(found).future.result()


def random_text(grammar: Any, seed: int, *, most: int = 400) -> tuple[str, bool]:
    """A text that a model without preferences might write, and whether it came to an end."""
    luck = np.random.default_rng(seed)
    tokens: list[int] = []
    ends = tokenizer().eos_ids
    while len(tokens) < most:
        mask = grammar.mask(())
        allowed = np.flatnonzero(mask)
        assert len(allowed), "nothing may follow"
        drawn = int(luck.choice(allowed))
        finished = sorted(ends.intersection(allowed.tolist()))
        if finished and luck.random() < 0.3:
            drawn = finished[0]
        if drawn in ends:
            return tokenizer().decode(tokens, skip_special=False), True
        tokens.append(drawn)
        grammar.append([drawn])
    return tokenizer().decode(tokens, skip_special=False), False
