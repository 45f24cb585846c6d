"""transformers on the same weights, where it is importable: the peer that runs everywhere."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch

from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


class TransformersPeer:
    """The model's own weights in transformers' eager code, float32, with its own KV cache."""

    name = "transformers"

    def __init__(self, model: str | None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with open_checkpoint(resolve(model)) as checkpoint:
            settings = dict(checkpoint.config)
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
            factory: Any = AutoModelForCausalLM
            self._model: Any = factory.from_config(config, dtype=torch.float32).eval()
            known = set(self._model.state_dict())
            state = {name: checkpoint.tensor(name) for name in checkpoint.names() if name in known}
            missing = self._model.load_state_dict(state, strict=False).missing_keys
        if any(name != "lm_head.weight" for name in missing):
            raise RuntimeError(f"transformers misses {missing[0]}")
        self._model.tie_weights()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, exactly `new_tokens` each; prompts of one length, as one batch."""
        ids = torch.tensor(prompts)
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                                   min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return [row[len(prompts[0]):].tolist() for row in out]

    @torch.inference_mode()
    def prefill_seconds(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self._model(torch.tensor([prompt]), logits_to_keep=1)
        return time.perf_counter() - begin
