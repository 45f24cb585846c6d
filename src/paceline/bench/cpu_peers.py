"""llama.cpp and onnxruntime-genai on the same model, where their Python packages are importable.

Both are driven closer to the metal than their users drive them: llama.cpp by llama_decode on token ids that are known
beforehand, so that no sampling and no text is counted; onnxruntime by its generator, which picks greedily in C++.
Answers to questions are their own: there numpy picks llama.cpp's tokens. Everything is measured after the weights are
loaded and one pass has warmed them up.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.bench.report import say
from paceline.hub.cache import cache_dir
from paceline.models.load.opening import open_checkpoint
from paceline.models.tokenizer import Tokenizer

STEP_RUNS = 25
REST_S = 0.1
"""Between two engines, so that the worker threads of the one before have stopped spinning."""
ROOM = 4096
"""Tokens of a prompt and its answer, at most."""


class PeerUnavailable(Exception):
    """Says in a sentence why a peer cannot be measured here."""


class MeasuredEngine(Protocol):
    """One engine under measurement. Every figure is of the engine alone, warm, with the threads it was given."""

    name: str

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        """Tokens a second after the first of `new_tokens`."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Prompt tokens a second until the logits of the last one are there."""
        ...

    def batch(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Tokens a second of all prompts decoding at once, after each has its first."""
        ...

    def step(self, prefix: list[int], tokens: list[int]) -> float:
        """Milliseconds of one forward over `tokens` after `prefix`, with the logits of every one of them."""
        ...

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary]: what is predicted after each, with nothing before the first. PeerUnavailable says why
        an engine does not tell."""
        ...


class Peer(MeasuredEngine, Protocol):
    def answer(self, prompt: list[int], most: int) -> Iterator[int]:
        """The tokens that the engine itself writes after the prompt, greedily, one at a time: up to `most`, and where
        it goes by ends of its own, none behind one. Nothing of an earlier prompt is left when this returns; the prompt
        is computed when the first token is asked for. Prompt and answer have up to ROOM tokens."""
        ...


def median_ms(prepare: Callable[[], None], work: Callable[[], None], runs: int = STEP_RUNS) -> float:
    """Median of `work` alone; `prepare` runs before each."""
    times = []
    for _ in range(runs + 2):
        prepare()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1e3


class LlamaCpp:
    """llama.cpp through its C functions, flash attention on."""

    def __init__(self, path: Path, name: str, threads: int) -> None:
        self.name = name
        self._api: Any = importlib.import_module("llama_cpp")
        self._threads = threads
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise PeerUnavailable(f"llama.cpp cannot load {path.name}")
        self._contexts: dict[tuple[int, int], Any] = {}
        self._context: Any = None
        self._batch = self._api.llama_batch_init(4096, 0, 1)
        self.prefill(list(range(500, 564)))

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        self._open(len(prompt) + new_tokens, 1)
        self._prompt(prompt)
        begin = time.perf_counter()
        for place in range(len(prompt), len(prompt) + new_tokens - 1):
            self._pass([prompt[place % len(prompt)]], [place], [0], [1])
        return (new_tokens - 1) / (time.perf_counter() - begin)

    def prefill(self, prompt: list[int]) -> float:
        self._open(len(prompt), 1)
        begin = time.perf_counter()
        self._prompt(prompt)
        return len(prompt) / (time.perf_counter() - begin)

    def batch(self, prompts: list[list[int]], new_tokens: int) -> float:
        self._open(len(prompts[0]) + new_tokens, len(prompts))
        for sequence, prompt in enumerate(prompts):
            self._prompt(prompt, sequence)
        count = len(prompts)
        sequences, wanted = np.arange(count), np.ones(count)
        begin = time.perf_counter()
        for place in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
            token = prompts[0][place % len(prompts[0])]
            self._pass(np.arange(token, token + count) % 40000, np.full(count, place), sequences, wanted)
        return count * (new_tokens - 1) / (time.perf_counter() - begin)

    def step(self, prefix: list[int], tokens: list[int]) -> float:
        self._open(len(prefix) + len(tokens), 1)
        self._prompt(prefix)
        count = len(tokens)
        places = np.arange(len(prefix), len(prefix) + count)

        def rewind() -> None:
            self._api.llama_memory_seq_rm(self._memory(), 0, len(prefix), -1)

        return median_ms(rewind, lambda: self._pass(tokens, places, np.zeros(count), np.ones(count)))

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        self._open(len(tokens), 1)
        count = len(tokens)
        self._pass(tokens, np.arange(count), np.zeros(count), np.ones(count))
        return np.array(self._rows(count), dtype=np.float32)

    def answer(self, prompt: list[int], most: int) -> Iterator[int]:
        self._open(ROOM, 1)  # the same for every prompt: a context of each length would fill the memory
        return self._greedy(prompt, most)

    def _greedy(self, prompt: list[int], most: int) -> Iterator[int]:
        self._prompt(prompt)
        for place in range(len(prompt), len(prompt) + most):
            token = int(self._rows(1)[0].argmax())
            yield token
            self._pass([token], [place], [0], [1])

    def _rows(self, count: int) -> Any:
        """The logits of the pass before: [count, vocabulary], where so many tokens were to have some."""
        width = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), (count, width))

    def _memory(self) -> Any:
        return self._api.llama_get_memory(self._context)

    def _open(self, tokens: int, sequences: int) -> None:
        """An empty context for so many tokens in each of so many sequences."""
        shape = (-(-tokens // 256) * 256, sequences)
        if shape in self._contexts:
            self._context = self._contexts[shape]
            self._api.llama_memory_clear(self._memory(), True)
            return
        settings = self._api.llama_context_default_params()
        settings.n_ctx = shape[0] * sequences
        settings.n_seq_max = sequences
        settings.n_batch, settings.n_ubatch = 4096, 512
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.no_perf = True
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise PeerUnavailable(f"llama.cpp cannot make a context of {settings.n_ctx} tokens")
        self._contexts[shape] = self._context
        # Its buffers are touched for the first time here, not while the clock runs.
        self._prompt(list(range(500, 500 + min(tokens, 512))))
        self._api.llama_memory_clear(self._memory(), True)

    def _prompt(self, prompt: list[int], sequence: int = 0) -> None:
        count = len(prompt)
        wanted = np.zeros(count)
        wanted[-1] = 1
        self._pass(prompt, np.arange(count), np.full(count, sequence), wanted)

    def _pass(self, tokens: Any, places: Any, sequences: Any, wanted: Any) -> None:
        count, batch = len(tokens), self._batch
        batch.n_tokens = count
        np.ctypeslib.as_array(batch.token, (count,))[:] = tokens
        np.ctypeslib.as_array(batch.pos, (count,))[:] = places
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        np.ctypeslib.as_array(batch.logits, (count,))[:] = wanted
        for row in range(count):
            batch.seq_id[row][0] = int(sequences[row])
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        self._api.llama_synchronize(self._context)


class OnnxRuntime:
    """onnxruntime-genai with 4-bit weights. `folder` computes the logits of the last token of a prompt only, which is
    what generating needs; `whole` all of them, which is what a verify step needs."""

    name = "onnxruntime int4"

    def __init__(self, folder: Path, whole: Path, threads: int) -> None:
        self._api: Any = importlib.import_module("onnxruntime_genai")
        self._last, self._all = self._load(folder, threads), self._load(whole, threads)
        self.prefill(list(range(500, 564)))

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        return self.batch([prompt], new_tokens)

    def prefill(self, prompt: list[int]) -> float:
        generator = self._generator(self._last, len(prompt) + 1, 1)
        tokens = np.array([prompt], dtype=np.int32)
        begin = time.perf_counter()
        generator.append_tokens(tokens)
        return len(prompt) / (time.perf_counter() - begin)

    def batch(self, prompts: list[list[int]], new_tokens: int) -> float:
        generator = self._generator(self._last, len(prompts[0]) + new_tokens, len(prompts))
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        generator.generate_next_token()  # the first comes from the prompt's own logits
        begin = time.perf_counter()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        return len(prompts) * (new_tokens - 1) / (time.perf_counter() - begin)

    def step(self, prefix: list[int], tokens: list[int]) -> float:
        generator = self._generator(self._all, len(prefix) + len(tokens) + 1, 1)
        generator.append_tokens(np.array([prefix], dtype=np.int32))
        more = np.array([tokens], dtype=np.int32)
        took = median_ms(lambda: generator.rewind_to(len(prefix)), lambda: generator.append_tokens(more))
        rows = generator.get_output("logits").shape[1]
        if rows != len(tokens):
            raise RuntimeError(f"onnxruntime computed logits for {rows} of {len(tokens)} tokens")
        return took

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        generator = self._generator(self._all, len(tokens) + 1, 1)
        generator.append_tokens(np.array([tokens], dtype=np.int32))
        found: npt.NDArray[np.float32] = np.asarray(generator.get_output("logits"), dtype=np.float32)
        if found.shape[1] != len(tokens):
            raise PeerUnavailable(f"{self.name}: logits of {found.shape[1]} of {len(tokens)} tokens only")
        return found.reshape(found.shape[1:])

    def answer(self, prompt: list[int], most: int) -> Iterator[int]:
        return self._greedy(self._generator(self._last, len(prompt) + most, 1, least=0), prompt)

    def _greedy(self, generator: Any, prompt: list[int]) -> Iterator[int]:
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def _load(self, folder: Path, threads: int) -> Any:
        config = self._api.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        return self._api.Model(config)

    def _generator(self, model: Any, length: int, sequences: int, least: int | None = None) -> Any:
        params = self._api.GeneratorParams(model)
        # A least length as long as the greatest, where nothing else is said: never ends early.
        params.set_search_options(max_length=length, min_length=length if least is None else least,
                                  batch_size=sequences, do_sample=False)
        return self._api.Generator(model, params)


def peers(path: Path, threads: int) -> Iterator[Callable[[], Peer]]:
    """One maker for each peer of the model at `path`; making one converts what it needs and may raise
    PeerUnavailable. Converted files are kept beside the fetched models and used again."""
    yield lambda: LlamaCpp(_gguf(path), "llama.cpp as shipped", threads)
    yield lambda: LlamaCpp(_requantised(_gguf(path), "Q4_0"), "llama.cpp Q4_0", threads)
    yield lambda: LlamaCpp(_requantised(_gguf(path), "Q8_0"), "llama.cpp Q8_0", threads)
    yield lambda: OnnxRuntime(_onnx(path, last_only=True), _onnx(path, last_only=False), threads)


def available(path: Path, threads: int) -> tuple[list[Peer], list[str]]:
    """The peers that can run here, and a line for each that cannot."""
    found: list[Peer] = []
    missing: list[str] = []
    for make in peers(path, threads):
        try:
            found.append(make())
        except PeerUnavailable as reason:
            if str(reason) not in missing:
                missing.append(str(reason))
    return found, missing


def _need(package: str, why: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise PeerUnavailable(f"{why} is left out: the package {package} is not installed")


def _gguf(path: Path) -> Path:
    _need("llama_cpp", "llama.cpp")
    api: Any = importlib.import_module("llama_cpp")
    api.llama_log_set(_silence(api), None)
    if path.suffix != ".gguf":
        raise PeerUnavailable(f"llama.cpp is left out: {path.name} is not a GGUF file")
    return path


def _silence(api: Any) -> Any:
    """A log callback that says nothing; kept on the module, because llama.cpp keeps only the pointer."""
    if not hasattr(api, "paceline_silence"):
        api.paceline_silence = api.llama_log_callback(lambda level, text, data: None)
    return api.paceline_silence


def _kept(path: Path) -> Path:
    """Where what was converted from `path` is kept."""
    with open_checkpoint(path) as checkpoint:
        folder = cache_dir() / "peers" / checkpoint.revision.replace("/", "_").replace(":", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _requantised(path: Path, kind: str) -> Path:
    api: Any = importlib.import_module("llama_cpp")
    target = _kept(path) / f"{kind}.gguf"
    if not target.exists():
        say(f"cpu: requantising to {kind} with llama.cpp")
        settings = api.llama_model_quantize_default_params()
        settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
        settings.allow_requantize = True
        part = target.with_suffix(".part")
        if api.llama_model_quantize(str(path).encode(), str(part).encode(), settings):
            raise PeerUnavailable(f"llama.cpp {kind} is left out: llama.cpp cannot requantise {path.name}")
        part.rename(target)
    return target


def _onnx(path: Path, last_only: bool) -> Path:
    """The model as 4-bit ONNX, made by onnxruntime-genai's own builder from a Hugging Face folder."""
    for package in ("onnxruntime_genai", "onnx", "onnx_ir", "transformers"):
        _need(package, "onnxruntime")
    target = _kept(path) / ("onnx_int4" if last_only else "onnx_int4_all_logits")
    if not target.exists():
        say("cpu: building a 4-bit ONNX model with onnxruntime-genai")
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            folder, built = Path(work) / "model", Path(work) / "onnx"
            write_folder(path, folder)
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(built),
                       "-p", "int4", "-e", "cpu", "-c", str(Path(work) / "cache"),
                       "--extra_options", f"prune_lm_head={str(last_only).lower()}"]
            done = subprocess.run(command, capture_output=True, text=True,
                                  env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
            if done.returncode or not (built / "genai_config.json").exists():
                last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise PeerUnavailable(f"onnxruntime is left out: its model builder failed ({last})")
            built.rename(target)
    return target


def write_folder(path: Path, folder: Path) -> None:
    """The model at `path` as a Hugging Face folder in float32, whatever it is stored as."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with open_checkpoint(path) as checkpoint:
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**checkpoint.config, "torch_dtype": "float32"}))
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is not None:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}))
