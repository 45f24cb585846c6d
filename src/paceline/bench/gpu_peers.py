"""Other engines on the same card, shapes and counts, where they are importable: transformers, vLLM, SGLang. Random
weights, greedy, prompts without shared beginnings. One after the other, each gone before the next one starts."""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from paceline.bench.gpu_shapes import SHAPES
from paceline.bench.report import say

LONGEST = 4096


class Peer(ABC):
    """An engine around random weights in one of SHAPES."""

    name: str
    package: str

    @abstractmethod
    def __init__(self, folder: str, dtype: str, device: str) -> None:
        """`folder` holds the shape as config.json."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], count: int) -> None:
        """So many tokens for each prompt, all at once; back when the last one is there."""

    def seconds(self, prompts: list[list[int]], count: int) -> float:
        started = time.perf_counter()
        self.generate(prompts, count)
        return time.perf_counter() - started


class Transformers(Peer):
    """As its users find it: eager, with its default cache."""

    name = package = "transformers"

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        package = import_module("transformers")
        config = package.AutoConfig.from_pretrained(folder)
        self._device = device
        with torch.device(device):
            self._model = package.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts, device=self._device)
        self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                             do_sample=False, pad_token_id=0).tolist()  # waits for the device


class VLLM(Peer):
    """Offline, in process."""

    name, package = "vLLM", "vllm"

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        package = import_module("vllm")
        self._params = package.SamplingParams
        self._llm = package.LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype,
                                max_model_len=LONGEST, max_num_seqs=256, gpu_memory_utilization=0.8,
                                enable_prefix_caching=False)

    def generate(self, prompts: list[list[int]], count: int) -> None:
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


class SGLang(Peer):
    name, package = "SGLang", "sglang"

    def __init__(self, folder: str, dtype: str, device: str) -> None:
        package = import_module("sglang")
        self._engine = package.Engine(model_path=folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype,
                                      context_length=LONGEST, disable_radix_cache=True, max_running_requests=256)

    def generate(self, prompts: list[list[int]], count: int) -> None:
        self._engine.generate(input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": count,
                                                                  "ignore_eos": True})


PEERS: tuple[type[Peer], ...] = (Transformers, VLLM, SGLang)


def importable() -> list[type[Peer]]:
    return [peer for peer in PEERS if importlib.util.find_spec(peer.package) is not None]


def measure(shape: str, dtype: str, cases: Sequence[str], batches: Sequence[int],
            prompt: int, device: str = "cuda") -> dict[str, dict[str, float]]:
    """By case of bench gpu (tpot_N in ms, ttft_2048 in ms) what each importable peer takes. One that fails is named
    with its reason and left out."""
    found: dict[str, dict[str, float]] = {}
    for kind in importable():
        with tempfile.TemporaryDirectory() as folder:
            try:
                (Path(folder) / "config.json").write_text(json.dumps(_config(shape, dtype)))
                peer = kind(folder, dtype, device)
                for case, value in _cases(peer, SHAPES[shape]["vocab_size"], cases, batches, prompt).items():
                    say(f"gpu {shape}: {kind.name} {case} {value:.4g} ms")
                    found.setdefault(case, {})[f"{kind.name} {import_module(kind.package).__version__}"] = value
                del peer
            except Exception as problem:
                say(f"gpu {shape}: {kind.name} is left out ({type(problem).__name__}: {problem})")
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _cases(peer: Peer, vocab: int, cases: Sequence[str], batches: Sequence[int], prompt: int) -> dict[str, float]:
    luck = random.Random(1)

    def prompts(batch: int, length: int) -> list[list[int]]:
        return [[luck.randrange(vocab) for _ in range(length)] for _ in range(batch)]

    found = {}
    if "ttft" in cases:
        peer.seconds(prompts(1, 2048), 1)
        found["ttft_2048"] = min(peer.seconds(prompts(1, 2048), 1) for _ in range(3)) * 1000
    for batch in batches if "tpot" in cases else ():
        peer.seconds(prompts(batch, prompt), 8)
        short, long = (peer.seconds(prompts(batch, prompt), count) for count in (8, 136))
        found[f"tpot_{batch}"] = (long - short) / 128 * 1000
    return found


def _config(shape: str, dtype: str) -> dict[str, Any]:
    kinds = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    own = SHAPES[shape]
    return own | {"architectures": [kinds[own["model_type"]]], "dtype": dtype, "torch_dtype": dtype,
                  "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
                  "head_dim": own.get("head_dim", own["hidden_size"] // own["num_attention_heads"])}
