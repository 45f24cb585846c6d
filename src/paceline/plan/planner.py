"""plan(): everything that can be said of a model, hardware and workload before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.models.fields import MOST_POSITIONS
from paceline.plan.capacity import Memory, Serving, best_serving, copies_for, cost_per_million, memory_of
from paceline.plan.drafters import Drafter
from paceline.plan.find import find_drafter
from paceline.plan.hardware import Hardware, find_hardware
from paceline.plan.known import find_shape
from paceline.plan.measured import Calibration, Comparison
from paceline.plan.roofline import Roofline, attention_intensity, mlp_intensity
from paceline.plan.shape import BITS, CACHE_BITS, ModelShape, coverage, weight_bits
from paceline.plan.speculation import break_even, chance, expected_tokens, tree_nodes, tree_tokens

DEPTHS = (1, 2, 3, 4, 5, 7, 10, 16)
TREES = ((2, 2, 1, 1), (4, 2, 2, 1, 1), (3, 3, 3, 3))
PAYS = 1.02
"""Speed-up from which on drafting is worth its memory."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of the model."""

    context: int = 4096
    """Tokens of a text, prompt and output together, at the time of a step."""
    batches: tuple[int, ...] = (1, 8, 64)
    prompt: int | None = None
    """Tokens; None: three quarters of the context."""
    output: int | None = None
    """Tokens; None: a quarter of the context."""
    rate: float | None = None
    """Requests a second to serve."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Longest time to a first token, and between two."""

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("prompt", self.prompt), ("output", self.output),
                            *(("batch", batch) for batch in self.batches)):
            if value is not None and not (type(value) is int and 1 <= value <= MOST_POSITIONS):
                raise ConfigError(f"{name} must be a whole number from 1 to {MOST_POSITIONS}, got {value!r}.")
        if not self.batches:
            raise ConfigError("batch names no number of sequences: give one or more, such as 1,8,64.")
        for name, number in (("rate", self.rate), ("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if number is not None and not 0.0 < number < float("inf"):
                raise ConfigError(f"{name} must be a number above 0, got {number!r}.")

    @property
    def prompt_tokens(self) -> int:
        return self.prompt or max(1, self.context * 3 // 4)

    @property
    def output_tokens(self) -> int:
        return self.output or max(1, self.context // 4)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Decoding with so many sequences at once."""

    batch: int
    ttft_s: float
    """Of a prompt that comes while the others of them decode: half of their step, and one that holds it and them. Where
    steps are kept shorter than that it is cut into pieces, and takes as many steps longer."""
    tpot_s: float
    floor_s: float
    """What data sheets would allow."""
    tokens_per_s: float
    fits: bool
    compute_bound: bool
    mlp_intensity: float
    experts: float | None
    """Distinct experts of a layer that a step reads; None: no mixture."""


@dataclass(frozen=True, slots=True)
class DepthRow:
    """A chain of K drafted tokens at one batch and acceptance, whether it pays or not."""

    drafter: str
    batch: int
    acceptance: float
    k: int
    tokens: float
    """A cycle, the target's own counted."""
    speed_up: float


@dataclass(frozen=True, slots=True)
class DraftRow(DepthRow):
    """The best depth there; 0: drafting does not pay."""

    break_even: float | None
    """Acceptance below which K, or 1 where that is 0, loses; None: it always does."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a drafter takes of the memory, and what of it must agree with the target."""

    drafter: str
    weights: float
    sequence: float
    """Bytes of its own cache, of one sequence."""
    cache: str
    sequences: int
    """That still fit."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A tree of that many children by depth, at the first batch."""

    drafter: str
    batch: int
    acceptance: float
    branches: tuple[int, ...]
    nodes: int
    tokens: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class Limit:
    """Up to how many sequences at once a drafter pays."""

    drafter: str
    acceptance: float
    batch: int | None
    """The largest with a speed-up of at least PAYS; None: at any that fits; 0: at none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Times are what is expected; `floor_s` alone is what data sheets would allow."""

    shape: ModelShape
    hardware: Hardware
    dtype: str
    kv_dtype: str
    workload: Workload
    memory: Memory
    ttft_s: float
    prefill_tokens_per_s: float
    compute_batch: int | None
    """Tokens in a step from which on matrices are computed longer than they are read."""
    attention_decode: float
    """FLOP/byte; 0 without attention."""
    attention_prefill: float
    rows: list[BatchRow]
    beside: list[Beside]
    drafts: list[DraftRow]
    by_k: list[DepthRow]
    trees: list[TreeRow]
    limits: list[Limit]
    serving: Serving | None
    copies: int | None
    """Of the model, for the rate that was asked for."""
    dollars_per_million: float | None
    drafters: list[Drafter]
    comparisons: Sequence[Comparison] = ()
    """Where the hardware was measured: what steps took, and what is predicted of them."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot run as asked, a sentence each."""

    @property
    def roofline(self) -> Roofline:
        """What is expected of it."""
        return Roofline(self.shape, self.hardware.sustained(), self.dtype, self.kv_dtype)

    @property
    def cards(self) -> int | None:
        return None if self.copies is None else self.copies * self.hardware.count


def plan(model: str | ModelShape, hardware: str | Hardware | Calibration = "h100", *, workload: Workload | None = None,
         dtype: str | None = None, kv_dtype: str | None = None, drafters: Sequence[str | Drafter] = ("ngram", "eagle3"),
         acceptance: Sequence[float] | None = None, k: int | None = None, price: float | None = None) -> Plan:
    """`acceptance`: of drafted tokens; None: what is typical of each drafter. `k`: that depth alone. `price`: dollars
    an hour of one card."""
    shape = find_shape(model) if isinstance(model, str) else model
    measured = hardware if isinstance(hardware, Calibration) else None
    machine = find_hardware(hardware) if isinstance(hardware, str) else (
        hardware.hardware if isinstance(hardware, Calibration) else hardware)
    work = workload or Workload()
    dtype, kv_dtype = dtype or shape.dtype, kv_dtype or usual_cache(shape, dtype)
    weight_bits(dtype)
    if kv_dtype not in CACHE_BITS:
        raise ConfigError(f"kv_dtype must be one of {', '.join(CACHE_BITS)}, got {kv_dtype!r}.")
    if k is not None and not 1 <= k <= 256:
        raise ConfigError(f"k must be a whole number from 1 to 256, got {k!r}.")
    for value in acceptance or ():
        chance(value)
    if price is not None and not 0.0 < price < float("inf"):
        raise ConfigError(f"price is dollars an hour, above 0, got {price!r}.")
    chosen = [find_drafter(one, shape) if isinstance(one, str) else one for one in drafters]
    real, floor = (Roofline(shape, one, dtype, kv_dtype) for one in (machine.sustained(), machine))
    memory = memory_of(floor, work.context)
    ttft = real.prefill(work.prompt_tokens)
    at_most = best_serving(real, work.prompt_tokens, work.output_tokens, memory.sequences, work.tpot_s)
    paid = price if price is not None else machine.price
    most = max(memory.sequences, *work.batches)
    decoding, prompting = (_attention_intensity(shape, kv_dtype, queries, work.context)
                           for queries in (1, work.context))
    return Plan(
        shape=shape, hardware=machine, dtype=dtype, kv_dtype=kv_dtype, workload=work, memory=memory, ttft_s=ttft,
        prefill_tokens_per_s=work.prompt_tokens / ttft, compute_batch=floor.compute_batch(),
        attention_decode=decoding, attention_prefill=prompting,
        rows=[_batch_row(real, floor, batch, work, memory) for batch in work.batches],
        beside=[_beside(floor, one, work.context) for one in chosen],
        drafts=[best_draft(real, one, batch, work.context, a, k) for one in chosen for batch in work.batches
                for a in acceptance or (one.acceptance,)],
        by_k=[row for one in chosen for batch in work.batches
              for row in _by_k(real, one, batch, work.context, acceptance or (one.acceptance,), k)],
        trees=[_tree(real, one, branches, work, a) for one in chosen if one.shape is not None
               for a in acceptance or (one.acceptance,) for branches in TREES],
        limits=[Limit(one.name, a, _limit(real, one, work.context, a, k, most)) for one in chosen
                for a in acceptance or (one.acceptance,)],
        serving=at_most,
        copies=copies_for(work.rate, at_most) if work.rate is not None and at_most is not None else None,
        dollars_per_million=(cost_per_million(paid, machine.count, at_most.tokens_per_s)
                             if paid and at_most is not None else None),
        drafters=chosen, comparisons=() if measured is None else measured.comparisons,
        problems=_problems(shape, machine, work, memory, chosen, at_most, ttft, kv_dtype))


def usual_cache(shape: ModelShape, dtype: str | None) -> str:
    found = dtype or shape.dtype
    return found if found in ("float32", "float16") else "bfloat16"


def _batch_row(real: Roofline, floor: Roofline, batch: int, work: Workload, memory: Memory) -> BatchRow:
    context = work.context
    tpot = real.decode(batch, context)
    ttft = real.prefill(work.prompt_tokens)
    if batch > 1:
        ttft = (real.decode(batch - 1, context) / 2
                + real.mixed([(1, work.prompt_tokens, 0), (batch - 1, 1, context)]).total)
    feed = next((layer.feed_forward for layer in real.shape.layers if layer.feed_forward.experts), None)
    return BatchRow(batch, ttft, tpot, floor.decode(batch, context), batch / tpot, batch <= memory.sequences,
                    floor.step(batch, 1, context).compute_bound, mlp_intensity(batch, BITS[real.dtype] / 8),
                    None if feed is None else coverage(feed.experts, feed.chosen, batch))


def cycle_cost(real: Roofline, drafter: Drafter, batch: int, context: int, k: int, nodes: int | None = None) -> float:
    """What a cycle costs in plain steps: drafting K deep, and verifying `nodes` drafted tokens (K, in a chain)."""
    drafting = drafter.cost(real.hardware, real.dtype, real.kv_dtype, batch, context, k)
    return (drafting + real.verify(batch, (nodes or k) + 1, context)) / real.decode(batch, context)


def best_draft(real: Roofline, drafter: Drafter, batch: int, context: int, a: float, k: int | None = None) -> DraftRow:
    depths = tuple(depth for depth in DEPTHS if depth <= drafter.most) if k is None else (min(k, drafter.most),)
    costs = {depth: cycle_cost(real, drafter, batch, context, depth) for depth in depths}
    gains = {depth: expected_tokens(a, depth) / cost for depth, cost in costs.items()}
    best = max(gains, key=lambda depth: gains[depth])
    if k is None and gains[best] < 1.0:
        return DraftRow(drafter.name, batch, a, 0, 1.0, 1.0, break_even(1, costs[1]))
    return DraftRow(drafter.name, batch, a, best, expected_tokens(a, best), gains[best], break_even(best, costs[best]))


def _by_k(real: Roofline, drafter: Drafter, batch: int, context: int, acceptance: Sequence[float], k: int | None
          ) -> list[DepthRow]:
    """All depths, and the one that was asked for."""
    depths = sorted({*(depth for depth in DEPTHS if depth <= drafter.most), min(k or DEPTHS[0], drafter.most)})
    costs = {depth: cycle_cost(real, drafter, batch, context, depth) for depth in depths}
    return [DepthRow(drafter.name, batch, a, depth, expected_tokens(a, depth), expected_tokens(a, depth) / cost)
            for a in acceptance for depth, cost in costs.items()]


def _beside(floor: Roofline, drafter: Drafter, context: int) -> Beside:
    weights = drafter.weight_bytes(floor.dtype)
    cached = drafter.cache_bytes(context, floor.kv_dtype)
    return Beside(drafter.name, weights, cached, drafter.cache,
                  memory_of(floor, context, weights, cached).sequences)


def _tree(real: Roofline, drafter: Drafter, branches: tuple[int, ...], work: Workload, a: float) -> TreeRow:
    nodes, batch, tokens = tree_nodes(branches), work.batches[0], tree_tokens(a, branches)
    cost = cycle_cost(real, drafter, batch, work.context, len(branches), nodes)
    return TreeRow(drafter.name, batch, a, branches, nodes, tokens, tokens / cost)


def _limit(real: Roofline, drafter: Drafter, context: int, a: float, k: int | None, most: int) -> int | None:
    """All are tried, in steps of a third or so: with experts a large batch may pay where a small one does not."""
    batches = sorted({*(round(2 ** (power / 2)) for power in range(2 * most.bit_length())), most})
    paying = [batch for batch in batches if batch <= most and pays(best_draft(real, drafter, batch, context, a, k))]
    return None if paying and paying[-1] == most else max(paying, default=0)


def pays(row: DraftRow) -> bool:
    return row.k > 0 and row.speed_up >= PAYS


def _attention_intensity(shape: ModelShape, kv_dtype: str, queries: int, keys: int) -> float:
    """Of the first layer that attends; 0: none does."""
    mixer = next((mixer for mixer in shape.mixers if mixer.read), None)
    return 0.0 if mixer is None else attention_intensity(queries, keys, mixer.heads, mixer.kv_heads,
                                                         CACHE_BITS[kv_dtype] / 8)


def _problems(shape: ModelShape, machine: Hardware, work: Workload, memory: Memory, drafters: Sequence[Drafter],
              at_most: Serving | None, ttft: float, kv_dtype: str) -> list[str]:
    found = [sentence for drafter in drafters for sentence in drafter.disagreements(shape)]
    if memory.left <= 0:
        found.append(f"The weights take {(memory.weights + memory.drafter) / 1e9:.1f} GB and {machine.label} has "
                     f"{memory.usable / 1e9:.1f} for them: use fewer bits (--dtype int4), more cards, or a smaller "
                     "model.")
    elif memory.sequences < 1:
        found.append(f"One text of {work.context} tokens needs {memory.sequence / 1e9:.2f} GB of cache, and "
                     f"{memory.left / 1e9:.2f} are left beside the weights: keep the cache in fewer bits "
                     "(--kv-dtype fp8), or shorten the context.")
    elif at_most is None:
        found.append(f"No batch has {1e3 * (work.tpot_s or 0):.0f} ms between two tokens: use faster cards, fewer "
                     "bits, or speculation.")
    if shape.context is not None and work.context > shape.context:
        found.append(f"{shape.name} was made for texts of {shape.context} tokens, and {work.context} are asked for.")
    if work.ttft_s is not None and ttft > work.ttft_s:
        found.append(f"A prompt of {work.prompt_tokens} tokens takes {1e3 * ttft:.0f} ms when nobody else is there, "
                     f"above the {1e3 * work.ttft_s:.0f} asked for: use more cards, or share prefixes.")
    found += [sentence for drafter in drafters for sentence in drafter.cache_limits(kv_dtype, machine)]
    return found
