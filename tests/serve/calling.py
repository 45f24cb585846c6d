"""A model that calls tools: what it says is written here."""

from __future__ import annotations

from typing import Any

import torch

from engine.tiny import tiny_engine, tiny_model
from paceline.bench.null_model import byte_tokenizer
from paceline.engine.core import Engine
from paceline.models.chat import ChatTemplate
from paceline.models.interface import ModelTraits

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '{"name": "get_weather", "arguments": {"city": "São Paulo, \\"SP\\"", "days": [1, {"a": "}"}]}}'
ARGUMENTS = {"city": 'São Paulo, "SP"', "days": [1, {"a": "}"}]}
TOKENIZER = byte_tokenizer()
ANSWER = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\x00"


class CallingModel(ModelTraits):
    """Says its script after any prompt that ends in "|>", as the template below does."""

    def __init__(self, script: str = ANSWER) -> None:
        inner = tiny_model(vocab_size=256, max_position_embeddings=2048)
        self.config, self.cache_groups = inner.config, inner.cache_groups
        self.script = TOKENIZER.encode(script)
        self.cue = TOKENIZER.encode("|>")
        self.asked: list[int] = []
        self.begin = 0

    def forward(self, token_ids: torch.Tensor, context: Any) -> torch.Tensor:
        """Looks for the cue in what is asked only, a prompt's rows in order: a draft may say it as well."""
        for token, position in zip(token_ids.tolist(), context.layout.positions.tolist(), strict=True):
            if position == 0:
                self.asked = []
            if position == len(self.asked) and self.asked[-2:] != self.cue:
                self.asked.append(token)
                self.begin = position
        return context.layout.positions[:, None].float() - self.begin

    def logits(self, hidden: torch.Tensor, kernels: Any) -> torch.Tensor:
        out = torch.zeros(len(hidden), 256)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            out[row, self.script[position % len(self.script)]] = 30.0
        return out


def calling_engine(script: str = ANSWER, mark: str = "") -> Engine:
    """`mark`: what the template says, by which a model's format is known."""
    engine = tiny_engine(CallingModel(script), TOKENIZER, enable_prefix_caching=False)
    engine.chat = ChatTemplate(f"{{# {mark} #}}{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}|>")
    return engine
