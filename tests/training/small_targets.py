"""A real target, small enough to be trained in seconds: it has learned to tell the way of animals through places."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from model_files import write_folder
from small_tokenizers import byte_level

from paceline.training.networks.llama import Llama, LlamaShape

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
ANIMALS = ["fox", "dog", "cat", "owl", "hen", "bee"]
PLACES = ["river", "house", "wood", "hill", "road", "sea"]


def story(drawn: Random) -> tuple[str, str]:
    """A prompt and an answer, of which much but not all can be foreseen."""
    animal, places = drawn.choice(ANIMALS), drawn.sample(PLACES, 3)
    how = drawn.choice(["quick", "lazy"])
    steps = [f"the {how} {animal} jumps over the {place}" for place in places]
    return f"{animal} {' '.join(places[:2])}", ", then ".join(steps) + "."


@cache
def weights(steps: int = 80) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tokenizer = byte_level("gpt-2")
    shape = LlamaShape(vocab_size=tokenizer.get_vocab_size(), hidden_size=48, num_layers=4, num_heads=4,
                       num_kv_heads=2, head_dim=12, intermediate_size=96, norm_eps=1e-5,
                       rope_theta=10000.0, positions=256)
    torch.manual_seed(0)
    model = Llama(shape, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    drawn = Random(0)
    for step in range(steps):
        texts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
                 for prompt, answer in (story(drawn) for _ in range(8))]
        ids = [tokenizer.encode(text).ids for text in texts]
        longest = max(map(len, ids))
        batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        logits = model(batch[:, :-1]) @ model.embed_tokens.weight.t()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tensors = {f"model.{name}": one.detach().clone() for name, one in model.named_parameters()}
    return shape.config(), tensors


def write_target(folder: Path) -> Path:
    config, tensors = weights()
    write_folder(folder, config, [tensors])
    byte_level("gpt-2").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}))
    return folder


def write_prompts(path: Path, count: int = 60) -> Path:
    drawn = Random(1)
    path.write_text("".join(json.dumps({"prompt": story(drawn)[0]}) + "\n" for _ in range(count)))
    return path
