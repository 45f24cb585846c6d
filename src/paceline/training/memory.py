"""How a card's memory is divided between training and the engines that make answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.llm import LLM

TRAINING = 0.5
"""Share of a card that is left to training."""
BESIDE = 2 << 30
"""Bytes that a worker takes beside weights and cache: CUDA's own, steps, what is captured of them."""
FEW = 16
"""Answers at once, of the longest: a worker that has no room for them is not worth its weights."""


@dataclass(frozen=True)
class Engines:
    """Workers that have room, and the cache blocks of each."""

    workers: int
    kv_blocks: int


def divide(room: int, fixed: int, block: int, text: int, at_once: int, workers: int) -> Engines:
    """As many of `workers` as fit into `room` bytes with `fixed` of them each, and blocks of `block` bytes: as many as
    `at_once` texts of `text` blocks need, or what there is room for."""
    for count in range(workers, 0, -1):
        blocks = min(at_once * text, (room // count - fixed) // block)
        if blocks >= min(at_once, FEW) * text:
            return Engines(count, blocks)
    return Engines(0, 0)


def divide_card(llm: LLM, at_once: int, workers: int) -> Engines:
    """Beside `llm`, which has just been loaded. Counted here and not by each worker from what it finds free: they start
    together, and none could know what the others will take."""
    engine = llm.engine
    config, device = engine.config, engine.storage.device
    text = -(-config.max_model_len // config.block_size)
    if device.type != "cuda":
        return Engines(workers, at_once * text)
    free, total = torch.cuda.mem_get_info(device)
    cache = sum(plane.nbytes for planes in engine.storage.planes for plane in planes)
    fixed = max(0, torch.cuda.memory_allocated(device) - cache) + BESIDE
    return divide(free - int(TRAINING * total), fixed, max(1, cache // config.kv_blocks), text, at_once, workers)
