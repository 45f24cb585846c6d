"""A server for the clients' tests, run by an interpreter that has Paceline. Its model says what it is told to say: what
comes after the last "Say: " of a conversation, or, once a tool has answered, what the tool said. It leaves when its
standard input ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("", "serve", "loading")]

import torch  # noqa: E402
from calling import CallingModel  # noqa: E402
from serving import served  # noqa: E402

from engine.tiny import tiny_engine, tiny_model  # noqa: E402
from paceline.bench.null_model import byte_tokenizer  # noqa: E402
from paceline.engine.core import Engine  # noqa: E402
from paceline.models.chat import ChatTemplate  # noqa: E402
from paceline.models.tokenizer import Tokenizer  # noqa: E402

CONTEXT = 16384
BYTES = byte_tokenizer()
TOKENIZER = Tokenizer(BYTES.backend, eos_ids=BYTES.encode("\x00"))
RESULT = "<tool_response>\n"


class SayingModel(CallingModel):
    """One conversation at a time."""

    def __init__(self) -> None:
        super().__init__("\x00")
        shape = tiny_model(vocab_size=256, max_position_embeddings=CONTEXT)
        self.config, self.cache_groups = shape.config, shape.cache_groups
        self.norm, self.embed = shape.norm, shape.embed

    def forward(self, token_ids: torch.Tensor, context: Any) -> torch.Tensor:
        if len(token_ids) > 1 and token_ids[-2:].tolist() == self.cue:
            said = TOKENIZER.decode(token_ids[:-2].tolist()).rpartition("Say: ")[2]
            if RESULT in said:
                said = f"It is {said.rpartition(RESULT)[2].partition('<')[0].strip()}."
            self.script = TOKENIZER.encode(f"{said}\x00")
        for layer in context.taps:  # for embeddings
            context.tapped[layer] = self.embed(token_ids)
        return super().forward(token_ids, context)


def saying_engine() -> Engine:
    engine = tiny_engine(SayingModel(), TOKENIZER, enable_prefix_caching=False, kv_blocks=2 * CONTEXT // 8,
                         max_batch_tokens=CONTEXT)
    engine.chat = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}|>{% endif %}")
    return engine


if __name__ == "__main__":
    with served(saying_engine()) as url:
        print(url, flush=True)
        sys.stdin.read()
