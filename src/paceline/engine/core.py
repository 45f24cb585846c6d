"""Engine: the model, the cache and all requests; how they come, go and fail. The loop itself: loop.py."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Messages
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

import torch

from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage
from paceline.config import EngineConfig
from paceline.engine.adapters import Adapters
from paceline.engine.admission import NEW, Prepared, begun_samples, check_params, check_prompt, check_search, start
from paceline.engine.bookkeeping import Bookkeeping, Touched
from paceline.engine.calibration import calibrate
from paceline.engine.decide.beams import BeamSearch
from paceline.engine.decide.decider import Decider
from paceline.engine.decide.recording import RecordedDrafts
from paceline.engine.drafting.drafting import Drafting
from paceline.engine.drafting.models import EngineDraftModels, LoadedModel, ModelSource
from paceline.engine.exchange import PrefixExchange
from paceline.engine.execute.graph_executor import GraphExecutor
from paceline.engine.execute.graphs.step_graphs import step_graphs
from paceline.engine.execute.host_executor import HostExecutor
from paceline.engine.execute.model_runner import ModelRunner
from paceline.engine.execute.target_heads import TargetHeads, head_planes
from paceline.engine.host_memory import HostMemory, host_report
from paceline.engine.loop import Loop
from paceline.engine.observe.observer import Observers
from paceline.engine.parallel.leader import Leader
from paceline.engine.profile import Profile, machine
from paceline.engine.records.emitter import StopCriteria
from paceline.engine.records.metrics import EngineMetrics
from paceline.engine.records.pooling import Pooling
from paceline.engine.records.record import Record
from paceline.engine.rows.batch import BatchBuilder
from paceline.engine.rows.placement import place
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.step import Step
from paceline.engine.setup import setup_of
from paceline.engine.structures import Structures
from paceline.errors import PacelineError, RequestError, StepError
from paceline.kernels.interface import Kernels
from paceline.models.chat import ChatEncoder, ChatTemplate
from paceline.models.heads.interface import Head
from paceline.models.heads.target import Target
from paceline.models.interface import CausalLM, activations
from paceline.models.tokenizer import Tokenizer
from paceline.process import OwnProcess
from paceline.request import Request, SamplingParams, Tenant
from paceline.sampling.native import load as native_sampler
from paceline.sampling.noise import sample_seed
from paceline.sampling.pipeline import Pipeline
from paceline.sampling.setup import Setup
from paceline.sampling.state import SampleState, tokenise_bad_words
from paceline.sampling.trace import Trace
from paceline.so_far import Past
from paceline.speculation import spec as speculations
from paceline.speculation.control import AdaptiveController
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step_cost import StepCost
from paceline.speculation.verify import RULES, rule_for

log = logging.getLogger("paceline.engine")

LOGIT_BYTES = 256 << 20
"""What the logits of prompts may take in a step whose log-probabilities are asked for (float32)."""


class Engine:
    """Owns the model, the cache and every live request. Not thread-safe: one thread drives it.

    add() admits a request, step() does one pass over all of them and returns the records it touched, cancel() ends
    one at any moment. A failing request fails alone.
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer | None, config: EngineConfig, kernels: Kernels, *,
                 device: torch.device, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype = torch.float32,
                 revision: str = "", eos_ids: frozenset[int] = frozenset(), chat: ChatTemplate | None = None,
                 speculation: Any = None, source: ModelSource | None = None, heads: Mapping[str, Head] | None = None,
                 head_kernels: Kernels | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`dtype`: what the weights were read as. `heads`: trained ones of the model, by the names that requests use;
        `head_kernels`: what they run with, where that is not what the model runs with."""
        self.model = model
        self.tokenizer = tokenizer
        self.chat = chat
        self._chat_encoder: ChatEncoder | None = None
        self.config = config
        self.kernels = kernels
        self.dtype = dtype
        self.revision = revision
        self.clock = clock
        self.speculation = speculations.parse(speculation)
        speculations.load_plugins(self.speculation)
        self.metrics = EngineMetrics()
        self.observers = Observers()
        self.process = OwnProcess()
        blocks = [config.kv_blocks + 1] * len(model.cache_groups)
        extra = head_planes(heads, kv_dtype, activations(model, device)) if heads else ()
        storage = KVStorage(model.cache_groups, blocks, config.block_size, kv_dtype, device, extra)
        if isinstance(model, Leader):
            model.keep(storage)
        host = HostMemory(storage, config)
        self.cache = CacheManager(model.cache_groups, blocks, config.block_size, max_seats=config.max_num_seqs,
                                  max_blocks_per_seq=config.max_blocks_per_seq,
                                  enable_prefix_caching=config.enable_prefix_caching, host=host.limits)
        self.cost = StepCost()
        self.profile = Profile(model=revision, shape=model.config, kernels=kernels.name, kv_dtype=kv_dtype,
                               bits=model.bits, machine=machine(device), threads=torch.get_num_threads(),
                               deterministic=kernels.deterministic, heads=sorted(heads or ()),
                               **({"ranks": model.size} if isinstance(model, Leader) else {}))
        self.profiled = bool(revision) and self.profile.load(self.cost)
        """What steps take was known from the start."""
        self.scheduler = Scheduler(
            SchedulerLimits(max_batch_tokens=config.max_batch_tokens, max_num_seqs=config.max_num_seqs,
                            watermark=config.watermark, max_queue=config.max_queue,
                            max_model_len=config.max_model_len, max_chunk=config.max_prefill_chunk,
                            max_step_s=None if config.max_step_ms is None else 1e-3 * config.max_step_ms,
                            max_logit_rows=max(1, LOGIT_BYTES // (4 * model.config.vocab_size))),
            self.cache, clock, host.preemption, self.cost)
        self.storage = storage
        self.adapters = Adapters(model, lambda: [seq.adapter for request_id in self._records
                                                 for seq in self.scheduler.sequences(request_id)])
        self.heads = TargetHeads(heads or {}, storage, head_kernels or kernels)
        if heads:
            self.heads.try_out(config.max_model_len, activations(model, device))
        self.runner = ModelRunner(model, kernels, storage, device, self.adapters.slots, self.heads)
        self.batches = BatchBuilder(self.cache.tables, model.cache_groups, config.block_size)
        self.decider = Decider(Pipeline(model.config.vocab_size, native_sampler()))
        graphs = None
        if config.captures:
            graphs = step_graphs(model, kernels, storage, self.cache.tables, device, self.adapters.slots, self.heads)
        self.executor: HostExecutor | GraphExecutor
        if graphs is None:
            self.executor = HostExecutor(self.runner, self.batches, self.decider, lambda: self.clock(),
                                         config.schedule_ahead)
        else:
            self.executor = GraphExecutor(graphs, self.runner, self.batches, self.decider, lambda: self.clock())
        self._vocab = model.config.vocab_size
        self.eos_ids = eos_ids
        self._drafting = Drafting(self._vocab, AdaptiveController(self.cost), clock, self.heads)
        self.draft_models = EngineDraftModels(LoadedModel(model, tokenizer, kernels, kv_dtype), storage, self.cache,
                                              self.scheduler, config, device, source, self.adapters.slots, graphs,
                                              self.heads)
        self._draft_context = DraftContext(
            self._vocab, build=self._part, fingerprint=lambda: tokenizer.fingerprint() if tokenizer else None,
            models=self.draft_models)
        self.structures = Structures(tokenizer, self._vocab, eos_ids, clock)
        self._bookkeeping = Bookkeeping(self.metrics, self.observers, self._drafting, self.structures,
                                        lambda: self.clock())
        self._records: dict[str, Record] = {}
        self._touched: Touched = {}
        """Records that got something new between two passes, until the next one tells of them."""
        self._ids = itertools.count()
        self._last_arrival = -math.inf
        self.loop = Loop(self.scheduler, self.executor, self._drafting, self._bookkeeping, self._end_requests,
                         self.structures.prepare, lambda: self.clock())

    def capture(self, progress: Callable[[str, int, int | None], None] | None = None) -> int:
        """Capture the steps of a device before the first request; how many there are (0: nothing is captured here)."""
        if isinstance(self.executor, HostExecutor):
            return 0
        return self.executor.capture(self.config.max_batch_tokens, progress)

    def warm_up(self) -> None:
        """Make what only the first request of a kind needs made, in calls that keep everybody beside it waiting: what
        steps take (calibration.py), tables of the tokenizer's control tokens, the chat template, what traces name, the
        grammars' view of the vocabulary. A server calls this before it has clients and before a thread steps the
        engine; whatever is missing or broken is told to who asks for it."""
        if not self.profiled and not self.has_work:
            begun = self.clock()
            calibrate(self)
            log.info("what steps take was measured in %.2f s", self.clock() - begun)
            if self.revision:
                self.profile.save(self.cost)
        if self.tokenizer is None:
            return
        written = "".join(self.tokenizer.control.names) + " as text"
        with suppress(PacelineError):
            self.prepare(written, SamplingParams())
        with suppress(PacelineError):
            self.render([{"role": "user", "content": written}])
        _ = self.setup
        self.structures.warm_up()

    def close(self) -> None:
        """No step will run any more: other processes that hold a share of the model (tensor parallel) end now, not when
        the garbage collector finds the engine."""
        if isinstance(self.model, Leader):
            self.model.close()

    # ---------------------------------------------------------------- requests

    def add(self, prompt: str | list[int], params: SamplingParams, *, speculation: Any = ...,
            request_id: str | None = None, adapter: str | None = None, tenant: Tenant | None = None,
            drafts: RecordedDrafts | None = None) -> str:
        """Admit a request or raise a RequestError; the id under which its records come. `adapter`: the name of one
        that is loaded. `tenant`: whose it is; None: it is everybody's who gives none. `drafts`: what is verified for
        it, in place of what `speculation` would draft."""
        return self.admit(self.prepare(prompt, params), speculation=speculation, request_id=request_id,
                          adapter=adapter, tenant=tenant, drafts=drafts)

    def prepare(self, prompt: str | list[int], params: SamplingParams, like: Prepared | None = None,
                past: Past = NEW) -> Prepared:
        """What admit() takes, or a RequestError. Tokenises, and reads nothing that steps change: call it in any thread,
        as long as the prompt may be. `like`: another prompt's with the same parameters, which are not read again.
        `past`: what has become of the request in another engine, from where this one goes on."""
        self.process.check()
        check_params(params)
        ids = check_prompt(prompt, params, self.tokenizer, self._vocab, self.config.max_model_len)
        if like is not None:
            structure, bad_words = like.structure, like.bad_words
        else:
            structure = self.structures.wanted(params)
            bad_words = tokenise_bad_words(params.bad_words, self._spell) if params.bad_words else []
        state = SampleState(params, ids, 0, self._vocab, self.eos_ids, bad_words)
        stops = StopCriteria.of(params, self.eos_ids) if like is None else like.stops
        begun = begun_samples(params, state, stops, past, lambda: self._text_stream(ids, params))
        return Prepared(prompt if isinstance(prompt, str) else None, ids, params, state, stops, structure, bad_words,
                        past, begun)

    def admit(self, prepared: Prepared, *, speculation: Any = ..., request_id: str | None = None,
              adapter: str | None = None, tenant: Tenant | None = None, shadow: bool = False,
              drafts: RecordedDrafts | None = None) -> str:
        """As add(), in the engine's thread: what is left to do takes no time to speak of. `shadow`: Request.shadow."""
        self.process.check()
        request_id = request_id if request_id is not None else f"request-{next(self._ids)}"
        if request_id in self._records:
            raise RequestError(f"The request id {request_id!r} is in use; choose another.", "request_id")
        params, ids = prepared.params, prepared.ids
        own = self.adapters.get(adapter)
        wish = self.speculation if speculation is ... else speculations.parse(speculation)
        if params.searches:
            check_search(params, self._vocab, self.config.max_num_seqs,
                         speculates=speculation is not ... and wish is not None)
            wish = None
        if params.pooling is not None:
            wish = None  # there is nothing to draft
            if not hasattr(self.model, "norm"):
                raise RequestError("This model has no hidden states that embeddings could be made of: choose another "
                                   "one.", "pooling")
        failure = None if wish is None else self._drafting.suspended.get(wish.method)
        drafter = None
        if wish is not None and drafts is None and failure is None:
            try:
                drafter = speculations.build(wish, self._draft_context)
            except PacelineError:  # it says what to change
                raise
            except Exception as problem:
                failure = self._drafting.not_built(wish.method, problem)
        rule = None if wish is None or drafter is None else rule_for(wish.verify, drafter.needs.samples)
        if wish is not None and drafts is not None:
            rule = RULES[drafts.rule]
        found = None if drafter is None or not self.executor.looks_up else drafter.needs.lookup
        lookup = 0
        if wish is not None and found is not None and rule is not None and rule.name == "coupled":
            lookup = found.packed(wish.k, always=not wish.adaptive)
        structure = prepared.structure

        now = self.clock()
        room = self.config.max_model_len - len(ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        past, begun = prepared.past, prepared.begun
        arrival = now if past.arrival is None else past.arrival
        deadline = None if params.timeout_s is None else arrival + params.timeout_s
        ttft, tpot = self._targets(params, tenant or Tenant())
        request = Request(request_id, ids, params, seed, most, arrival, deadline, wish, prepared.text, own,
                          tenant or Tenant(), None if begun else ttft, tpot, shadow)
        seeds = [sample_seed(seed, i) for i in range(params.samples)]
        sequences = self.scheduler.add(request, seeds, held=structure is not None, accepted=past.accepted,
                                       said=[one.said for one in begun])
        living = [seq for seq in sequences if seq.status is not Status.FINISHED]
        try:
            record = self._record(prepared, request, sequences, rule is not None, lookup)
            if wish is not None and rule is not None:
                record.speculation = SpeculationStats(wish.method, wish.verify, rule.name)
                if record.trace is not None:
                    record.trace.rule = rule.name
                for seq in living:
                    seq.rule = rule.name
                    if drafter is not None:
                        self._drafting.begin(seq, drafter, record.speculation)
                    elif drafts is not None:
                        self._drafting.repeat(seq, drafts)
            elif wish is not None:
                record.speculation = SpeculationStats(wish.method, wish.verify, failure=failure)
            if structure is not None and living:
                self.structures.hold(request, structure)
        except BaseException:  # whatever broke: nobody will ask for a request that was not admitted
            for seq in self.scheduler.cancel(request_id):
                self._drafting.release(seq)
            raise
        self._records[request_id] = record
        if not shadow:
            self._last_arrival = now
            self.metrics.requests += 1
            self.observers.admitted(record)
        if not living:
            self._touched[request_id] = record
            self._bookkeeping.over(record)
        return request_id

    def _record(self, prepared: Prepared, request: Request, sequences: list[Sequence], drafts: bool,
                lookup: int) -> Record:
        """What is kept of a request, and what its sequences know of it."""
        params = request.params
        for seq in sequences:
            seq.wait_for_commit = params.searches
            start(seq, prepared, lambda: self._text_stream(request.prompt, params))
            if seq.status is not Status.FINISHED:
                place(seq, self.executor.make_room, drafts, lookup)
        record = Record(request, [seq.emitter for seq in sequences],
                        None if prepared.begun else self._new_trace(request), prepared.past.so_far)
        if params.pooling is not None:
            last = self.model.config.num_layers
            record.pooling = Pooling(params.pooling, len(request.prompt), last, self._final_norm)
            for seq in sequences:
                seq.taps = frozenset({last})
        search = BeamSearch(sequences) if params.searches else None
        for seq in sequences:
            seq.record, seq.search = record, search
        return record

    @torch.inference_mode()
    def _final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.kernels.norm(hidden, cast(Target, self.model).norm)

    def cancel(self, request_id: str, reason: str = "cancelled") -> None:
        """End a request now, wherever it is; its blocks are free when this returns."""
        for seq in self.scheduler.cancel(request_id):
            self._bookkeeping.close(seq, reason)

    def suspend(self, method: str, why: str) -> None:
        """Draft by a method no more, between two steps: requests that name it decode plainly, which changes no text."""
        self._drafting.suspend(method, why)

    @property
    def suspended(self) -> Mapping[str, str]:
        """Methods that draft no more, and why."""
        return self._drafting.suspended

    def take(self, request_id: str) -> Record:
        """The record of a finished request, forgotten by the engine from here on."""
        return self._records.pop(request_id)

    def record(self, request_id: str) -> Record:
        """The live record of a request that was admitted and not taken yet."""
        return self._records[request_id]

    def report(self) -> dict[str, Any]:
        """Totals since the start (EngineMetrics) and the state of queue and cache now, in plain types."""
        usage = self.cache.usage()
        return self.metrics.as_dict() | {
            "preemptions": self.scheduler.preemptions, "drafter_failures": self._drafting.failures,
            "speculation": {name: total.as_dict() for name, total in self._drafting.totals.items()},
            "suspended": dict(self._drafting.suspended),
            "running": sum(not seq.request.shadow for seq in self.scheduler.running),
            "waiting": self.scheduler.queue_length,
            "cache_blocks": usage.total, "cache_blocks_used": usage.used, "cache_blocks_cached": usage.cached,
            "cache_use": usage.used / usage.total, "cache_evictions": usage.evictions,
            "cache_hit_tokens": usage.hits, "cache_looked_up_tokens": usage.queries,
            "cache_hit_rate": usage.hits / usage.queries if usage.queries else None} | host_report(self.cache)

    @property
    def storages(self) -> list[KVStorage]:
        """What is kept of tokens: the target's cache, and those of models that draft with one of their own."""
        return [self.storage, *self.draft_models.storages]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._touched)

    def step(self) -> list[Record]:
        """One pass. Returns the records that have something new (tokens, an end, an error)."""
        self.process.check()
        started = self.clock()
        touched, self._touched = self._touched, {}
        for seq in self.scheduler.expire(started):
            self._bookkeeping.close(seq, "timeout")
            touched[seq.record.request.id] = seq.record
        for request_id in self.structures.release(self._records, self.scheduler):
            self.cancel(request_id, "error")
            touched[request_id] = self._records[request_id]
        self.loop.step(started, started - self._last_arrival, touched)
        return list(touched.values())

    def _end_requests(self, step: Step | None, problem: BaseException, touched: Touched) -> None:
        """A step broke: its requests end with an error, their blocks are freed, everybody else goes on. None: it
        broke while it was put together, and nobody can say on whose account; all requests end."""
        records = list(self._records.values()) if step is None else [group.seq.record for group in step.groups]
        if isinstance(problem, Exception):
            names = list(dict.fromkeys(record.request.id for record in records if record.open))
            log.error("a step failed; its requests end with an error", exc_info=problem, extra={"request_ids": names})
        error = problem if isinstance(problem, PacelineError) else StepError(
            "The engine could not run this request's step; try it again, alone if it persists.", problem)
        for record in records:
            if record.open:
                record.error = error
                self.cancel(record.request.id, "error")
                self._bookkeeping.close_rest(record, "error")
                touched[record.request.id] = record
        if not isinstance(problem, Exception):
            raise problem  # Ctrl-C is the caller's; the engine is fit for the next call

    # ---------------------------------------------------------------- small things

    def _targets(self, params: SamplingParams, tenant: Tenant) -> tuple[float | None, float | None]:
        """Seconds in which a request's first token and each further one should come. Of a tenant among others no less
        than the engine's: everybody's drafts pay for haste."""
        own = (params.target_ttft_ms, params.target_tpot_ms)
        usual = (self.config.target_ttft_ms, self.config.target_tpot_ms)
        least = [math.inf if one is None else one for one in usual] if tenant.name else [0.0, 0.0]
        wanted = [most if mine is None else max(mine, few) for mine, most, few in zip(own, usual, least)]
        ttft, tpot = (None if one is None or math.isinf(one) else 1e-3 * one for one in wanted)
        return ttft, tpot

    def _spell(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer and this model came without one; "
                               "use logit_bias with token ids instead.", "bad_words")
        return self.tokenizer.encode_inside(text)

    def render(self, messages: Messages[Mapping[str, Any]], *, parse_special: bool = False,
               max_prompt_len: int | None = None, **template: Any) -> list[int]:
        """A conversation as the token ids the model was trained to continue. Special tokens written in messages are
        text; with `parse_special` they are special tokens. One that cannot have as few as `max_prompt_len` tokens is
        refused before it is tokenised. `continue_final_message=True`: the prompt ends with the last message, which the
        model goes on with. In any thread."""
        if self.chat is None or self.tokenizer is None:
            raise RequestError("This model came without a chat template or tokenizer: give a prompt to generate() "
                               "instead.", "messages")
        if self._chat_encoder is None:
            self._chat_encoder = ChatEncoder(self.chat, self.tokenizer)
        return self._chat_encoder.encode(messages, parse_special=parse_special, max_prompt_len=max_prompt_len,
                                         **template)

    def _part(self, wish: Any) -> Drafter:
        """A drafter for drafters that are made of others (DraftContext.build)."""
        parsed = speculations.parse(wish)
        if parsed is None:
            raise RequestError("A drafter made of others needs a method's name or a dict for each, got None.",
                               "speculation")
        return speculations.build(parsed, self._draft_context)

    def _text_stream(self, prompt: list[int], params: SamplingParams) -> Any:
        return None if self.tokenizer is None else self.tokenizer.detokenizer(params.skip_special_tokens, prompt)

    def _new_trace(self, request: Request) -> Trace | None:
        if not request.params.trace:
            return None
        wish = request.speculation
        return Trace(self.setup, list(request.prompt), request.params, request.seed,
                     speculation=None if wish is None else wish.as_dict(),
                     adapter=None if request.adapter is None else request.adapter.identity)

    @cached_property
    def exchange(self) -> PrefixExchange:
        """Blocks of the prefix cache for other engines, and from them."""
        return PrefixExchange(self.cache, self.storage, self.setup, lambda: self.heads.lost,
                              lambda copies: self.loop.catch_up(self.storage, self._touched, copies))

    @cached_property
    def setup(self) -> Setup:
        """What of this engine decides texts, for traces."""
        return setup_of(self)
