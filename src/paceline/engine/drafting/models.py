"""EngineDraftModels: the models an engine can draft with, each made once and shared by all requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.config import EngineConfig, available_memory
from paceline.engine.drafting.cached_models import OwnCacheModel, TargetCacheModel
from paceline.engine.drafting.device_sampler import DeviceDraftSampler
from paceline.engine.drafting.heads import HeadModel
from paceline.engine.drafting.runner import DraftRunner
from paceline.engine.execute.graphs.memory import GraphMemory
from paceline.engine.execute.graphs.step_graphs import StepGraphs, draft_graphs
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.execute.target_heads import TargetHeads, no_heads
from paceline.engine.rows.batch import BatchBuilder
from paceline.engine.schedule.scheduler import Scheduler
from paceline.errors import RequestError
from paceline.kernels.cpu import NativeKernels
from paceline.kernels.cpu import load as native_library
from paceline.kernels.interface import Kernels
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.interface import CausalLM
from paceline.models.native import NativeDecoder, unsupported
from paceline.models.packing import PackingWeights
from paceline.models.reduced import LowBitWeights, ShorterModel
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.models.weight_source import WeightSource
from paceline.speculation.models import ATTENTION, MLP, DraftModel, Sublayer

log = logging.getLogger("paceline.speculation")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready to run with its kernels."""

    model: CausalLM
    tokenizer: Tokenizer | None
    kernels: Kernels
    kv_dtype: torch.dtype = torch.float32


class ModelSource(Protocol):
    """Where an engine gets further models from; made by whoever built it."""

    threads: int
    """For native code."""

    def load(self, name: str, max_model_len: int) -> LoadedModel:
        """Any model by path or name, with the engine's options, for positions below max_model_len (or fewer)."""

    def weights(self) -> AbstractContextManager[WeightSource]:
        """The target's own weights once more."""


class EngineDraftModels:
    """Implements speculation.models.DraftModels around a running engine's parts."""

    def __init__(self, target: LoadedModel, storage: KVStorage, cache: CacheManager, scheduler: Scheduler,
                 config: EngineConfig, device: torch.device, source: ModelSource | None, adapters: AdapterSlots,
                 graphs: StepGraphs | None = None, heads: TargetHeads | None = None) -> None:
        """`adapters`: the target's, which reduced forms of it draft with. `graphs`: what is captured for the target's
        steps, where something is. `heads`: the target's."""
        self._target = target
        self._storage = storage
        self._memory = GraphMemory() if graphs is None else graphs.memory
        self._sampler = None if graphs is None else DeviceDraftSampler(graphs)
        self._cache = cache
        self._scheduler = scheduler
        self._config = config
        self._device = device
        self._adapters = adapters
        self._vocab = target.model.config.vocab_size
        self.source = source
        self._loaded: dict[str, tuple[DraftModel, int | None]] = {}
        """By name, with the cache size that was asked for."""
        self.storages: list[KVStorage] = []
        """Caches that models have of their own."""
        self._rounded: dict[int, DraftModel] = {}
        """By bits."""
        self._shorter: WeakValueDictionary[object, TargetCacheModel] = WeakValueDictionary()
        """Cheap to make, and there is no end of them: kept while a drafter has them."""
        self._in_memory: dict[str, LoadedModel] = {}
        self._heads = heads or no_heads(storage, target.kernels)
        self._head_models: dict[str, HeadModel] = {}

    @property
    def layers(self) -> int:
        return self._target.model.config.num_layers

    @property
    def heads(self) -> dict[str, str]:
        return {name: head.config.kind for name, head in self._heads.heads.items() if name not in self._heads.lost}

    def add(self, name: str, model: LoadedModel) -> None:
        """Offer a model that is in memory already: {"method": "draft", "model": name} then means it."""
        self._in_memory[name] = model

    def load(self, model: str, cache_tokens: int | None = None) -> DraftModel:
        if model not in self._loaded:
            self._loaded[model] = (self._own(model, cache_tokens), cache_tokens)
        found, tokens = self._loaded[model]
        if cache_tokens is not None and cache_tokens != tokens:
            raise RequestError(f"The draft model {model!r} is in use with cache_tokens={tokens}: leave cache_tokens "
                               "out, or say the same.", "speculation")
        return found

    def skipping(self, sublayers: frozenset[Sublayer]) -> DraftModel:
        if not self._target.model.skips_sublayers:
            halves = [layer for layer, _ in sublayers if not {(layer, ATTENTION), (layer, MLP)} <= sublayers]
            if halves:
                raise RequestError(
                    f"speculation skip names one half of layer {min(halves)}, and the native kernels skip whole layers "
                    f"only: write {min(halves)} instead, or run with kernels='eager' or 'reference'.", "speculation")
        return self._short(sublayers, lambda: ShorterModel(self._target.model, skip=sublayers))

    def exiting(self, layers: int) -> DraftModel:
        return self._short(layers, lambda: ShorterModel(self._target.model, layers))

    def rounded(self, bits: int | None) -> DraftModel:
        target = self._target
        own = target.model.bits
        if own <= 4 or (bits is not None and bits >= own):
            raise RequestError(
                f"The model runs in {own} bits already, so there is nothing to draft with in {bits or 'fewer'} bits: "
                "use another speculation method" + (" or fewer bits." if own > 4 else "."), "speculation")
        chosen = bits if bits is not None else 8 if own > 8 else 4
        if chosen not in self._rounded:
            self._rounded[chosen] = self._in_bits(chosen)
        return self._rounded[chosen]

    def head(self, kind: str, name: str | None = None) -> DraftModel:
        known = {own: head.config.kind for own, head in self._heads.heads.items()}
        loaded = ", ".join(f"{own} ({its})" for own, its in known.items()) or "none"
        if name is None:
            fitting = [own for own, its in known.items() if its == kind]
            if len(fitting) != 1:
                raise RequestError(f"speculation method {kind!r} needs 'head': the name or folder of a head that was "
                                   f"loaded when the engine was made (loaded: {loaded}).", "speculation")
            name = fitting[0]
        if name not in known:
            raise RequestError(f"The head {name!r} is not loaded, and every step has to store what a head keeps from "
                               "the first one on: name it when the engine is made (heads=[...], --head, or as the "
                               f"default speculation). Loaded: {loaded}.", "speculation")
        if known[name] != kind:
            raise RequestError(f"The head {name!r} is of the kind {known[name]!r}: ask for it with "
                               f"{{\"method\": {known[name]!r}, ...}}.", "speculation")
        if name not in self._head_models:
            self._head_models[name] = HeadModel(name, self._heads, self._storage, self._cache, self._scheduler,
                                                self._vocab, self._config.max_model_len, self._device)
        return self._head_models[name]

    def _short(self, key: object, make: Callable[[], CausalLM]) -> DraftModel:
        found = self._shorter.get(key)
        if found is None:
            found = self._shorter[key] = self._reduced(make())
        return found

    def _reduced(self, model: CausalLM, kernels: Kernels | None = None) -> TargetCacheModel:
        kernels = kernels or self._target.kernels
        runner = self._runner(model, kernels, self._storage, self._cache)
        return TargetCacheModel(runner, self._cache, self._scheduler, self._vocab, self._config.max_model_len,
                                self._sampler)

    def _runner(self, model: CausalLM, kernels: Kernels, storage: KVStorage, cache: CacheManager) -> DraftRunner:
        runner = ModelRunner(model, kernels, storage, self._device, self._adapters)
        builder = BatchBuilder(cache.tables, model.cache_groups, storage.block_size)
        graphs = None
        if self._config.captures:
            graphs = draft_graphs(model, kernels, storage, cache.tables, self._device, self._memory, self._adapters)
        return DraftRunner(runner, builder, graphs, self._memory)

    def _in_bits(self, bits: int) -> DraftModel:
        target, config = self._target, self._target.model.config
        if self.source is None:
            raise RequestError("speculation method 'precision' needs the model's weights once more, and this engine "
                               "was built around a model in memory: use another method.", "speculation")
        native = self._device.type == "cpu" and native_library() is not None
        whole = unsupported(config) is None and target.kv_dtype in (torch.float32, torch.float16, torch.int8)
        with self.source.weights() as weights:
            rounded = LowBitWeights(weights, bits)
            if native and whole:
                return self._reduced(
                    NativeDecoder(config, rounded, self._config.max_model_len, threads=self.source.threads,
                                  kv_dtype=target.kv_dtype, keep_blocks=bits == 4), NativeKernels())
            if native:
                packing = PackingWeights(rounded, keep_blocks=bits == 4)
                return self._reduced(build(config, packing, self._config.max_model_len),
                                     NativeKernels(self.source.threads))
            log.warning("precision: this model cannot run in %d bits here, so the draft's weights are rounded but as "
                        "large as the target's: right, and no faster", bits)
            return self._reduced(build(config, rounded, self._config.max_model_len))

    def _own(self, name: str, cache_tokens: int | None) -> DraftModel:
        loaded = self._in_memory.get(name)
        if loaded is None:
            if self.source is None:
                raise RequestError(f"This engine was built around a model in memory and knows no draft model {name!r}: "
                                   "add it first.", "speculation")
            loaded = self.source.load(name, self._config.max_model_len)
        check_same_vocabulary(self._target, loaded, name)
        model, config = loaded.model, self._config
        longest = min(config.max_model_len, model.config.max_position_embeddings)
        blocks = 1 + self._blocks(loaded, cache_tokens)
        cache = CacheManager(model.cache_groups, [blocks] * len(model.cache_groups), config.block_size,
                             max_seats=config.max_num_seqs, max_blocks_per_seq=-(-longest // config.block_size),
                             enable_prefix_caching=config.enable_prefix_caching)
        storage = KVStorage(model.cache_groups, [blocks] * len(model.cache_groups), config.block_size,
                            loaded.kv_dtype, self._device)
        self.storages.append(storage)
        runner = self._runner(model, loaded.kernels, storage, cache)
        return OwnCacheModel(runner, cache, self._vocab, longest, config.max_batch_tokens, self._sampler)

    def _blocks(self, loaded: LoadedModel, cache_tokens: int | None) -> int:
        """As many tokens as the target's cache holds, if memory allows."""
        size = self._config.block_size
        if cache_tokens is not None:
            return -(-cache_tokens // size)
        per_block = size * bytes_per_token(loaded.model.cache_groups, loaded.kv_dtype)
        free = int(torch.cuda.mem_get_info(self._device)[0]) if self._device.type == "cuda" else available_memory()
        return max(1, min(self._config.kv_blocks, free // 2 // per_block))


def check_same_vocabulary(target: LoadedModel, draft: LoadedModel, name: str) -> None:
    """Refuse a draft model whose ids do not mean what the target's mean, with the first difference."""
    refusal = f"The model {name!r} cannot draft for this one: "
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        if (ours is None) != (theirs is None):
            raise RequestError(refusal + "one of them has no tokenizer, so nobody can tell whether their ids mean the "
                               "same tokens. Use one that was trained with the same tokenizer.", "speculation")
        sizes = target.model.config.vocab_size, draft.model.config.vocab_size
        if sizes[0] != sizes[1]:
            raise RequestError(refusal + f"its vocabulary has {sizes[1]} ids and the target's {sizes[0]}.",
                               "speculation")
        return
    a, b = ours.table.tokens, theirs.table.tokens
    for token_id in range(max(len(a), len(b))):
        mine = a[token_id] if token_id < len(a) else None
        its = b[token_id] if token_id < len(b) else None
        if mine != its:
            raise RequestError(
                refusal + f"id {token_id} is {mine!r} for the target and {its!r} for it. Use a model that was trained "
                "with the same tokenizer.", "speculation")
