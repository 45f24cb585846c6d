"""Does a verify step give the bits of a decode step? Measured on an engine as it runs: its model, its number formats,
its device.

A text is decoded plainly, alone, a token a step: its logits and its keys and values are what all else is held to. Then
the same request runs in other circumstances, most of them with drafts, and every row that follows the same tokens must
have the same logits, and the cache the same content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.engine.core import Engine
from paceline.engine.rows.sample_rows import SampleRows
from paceline.engine.schedule.sequence import Sequence
from paceline.errors import ConfigError
from paceline.request import SamplingParams

SEED = 7
"""Of the text; those of company count on from it."""
COMPANY = 5
"""Requests beside it."""
PROMPT = 48
LEAST_ROWS, MOST_ROWS = 1, 64
PASSAGE = ("The committee met on Tuesday to discuss the bridge. Its oldest arch, built in 1847, had begun to lean, and "
           "nobody could say by how much. \"Measure it again,\" said the engineer, \"and then once more.\" ")


@dataclass(frozen=True, slots=True)
class Circumstance:
    """How the text is decoded again."""

    name: str
    draft: dict[str, Any] | None = None
    company: bool = False
    chunked: bool = False


def circumstances(rows: int) -> Iterator[Circumstance]:
    """`rows`: of the longest verify step; the first of each is the newest token, the others are drafts."""
    yield Circumstance("decode in company", company=True)
    for k in sorted({1, 2, 3, *range(4, rows, max(1, rows // 4)), rows}):
        if k <= rows:
            yield Circumstance(f"verify, chain of {k}", {"method": "oracle", "k": k})
    deep = min(4, rows)
    tree = {"method": "oracle", "k": deep, "branches": 3}
    yield Circumstance(f"verify, tree of {deep} x 3", tree)
    yield Circumstance("verify, wrong chain", {"method": "wrong", "k": rows})
    yield Circumstance("verify, wrong tree", {"method": "wrong", "k": deep, "branches": 2})
    yield Circumstance("verify, chain in company", {"method": "oracle", "k": rows}, company=True)
    # Last, because steps stay small from there on.
    yield Circumstance("decode behind a prompt in chunks", chunked=True)
    yield Circumstance("verify, tree in company, behind chunks", tree, company=True, chunked=True)


@dataclass(slots=True)
class Compared:
    """One circumstance beside plain decoding."""

    name: str
    positions: int = 0
    """Whose logits were compared."""
    equal: int = 0
    """Of those, with the same bits."""
    first_difference: int | None = None
    """The output token before which logits differ first; None: nowhere."""
    largest_difference: float = 0.0
    """Between two logits."""
    kl: float = 0.0
    """The highest over positions, in nats: KL(plain || this)."""
    argmax_differs: int = 0
    """Positions whose likeliest token is another."""
    kv_positions: int = 0
    kv_equal: int = 0
    """Positions of the cache with the same keys and values in every layer."""
    same_text: bool = True
    accepted: int = 0
    """Drafted tokens that stood: rows of verify steps were really used."""

    @property
    def holds(self) -> bool:
        return self.same_text and self.equal == self.positions and self.kv_equal == self.kv_positions


@dataclass(slots=True)
class BitsReport:
    """What was found, for people and as JSON."""

    model: str
    device: str
    kernels: str
    dtype: str
    """That the weights were read as."""
    quantization: str | None
    """How they were packed after that (EngineOptions.quantization); None: they are floats."""
    kv_dtype: str
    promised: bool
    """Whether this mode promises the same bits."""
    compared: list[Compared] = field(default_factory=list)

    @property
    def positions(self) -> int:
        return sum(one.positions for one in self.compared)

    @property
    def equal(self) -> int:
        return sum(one.equal for one in self.compared)

    @property
    def holds(self) -> bool:
        return all(one.holds for one in self.compared)

    @property
    def broken(self) -> bool:
        """A promise that was not kept."""
        return self.promised and not self.holds

    @property
    def verdict(self) -> str:
        """A sentence that can be quoted."""
        weights = self.dtype if self.quantization is None else f"{self.quantization} from {self.dtype}"
        where = (f"{self.model} on {self.device} ({self.kernels} kernels, weights in {weights}, cache in "
                 f"{self.kv_dtype})")
        if self.holds:
            return (f"Verify steps give the bits of decode steps: {where}, logits of {self.positions:,} positions in "
                    f"{len(self.compared)} circumstances, keys and values included.")
        most = max(one.largest_difference for one in self.compared)
        other = sum(one.argmax_differs for one in self.compared)
        found = (f"{self.equal:,} of {self.positions:,} positions have the same bits, logits differ by {most:.3g} at "
                 f"most, and the likeliest token is another at {other:,}")
        if self.promised:
            return f"Verify steps do NOT give the bits of decode steps, which this mode promises: {where}, {found}."
        return (f"Verify steps need not give the bits of decode steps in this mode, and do not: {where}, {found}. "
                "--deterministic promises them.")

    def as_dict(self) -> dict[str, Any]:
        names = ("model", "device", "kernels", "dtype", "quantization", "kv_dtype", "promised", "holds", "positions",
                 "equal", "verdict")
        return {name: getattr(self, name) for name in names} | {
            "compared": [{name: getattr(one, name) for name in (*one.__slots__, "holds")} for one in self.compared]}


class StepBits:
    """Runs the same text again and again on an engine that nobody else uses."""

    def __init__(self, engine: Engine, positions: int) -> None:
        self._engine = engine
        self._prompt = _prompt(engine)
        room = engine.config.max_model_len - len(self._prompt) - MOST_ROWS - 1
        if room < 1:
            raise ConfigError(f"The context holds {engine.config.max_model_len} tokens and this takes at least "
                              f"{engine.config.max_model_len + 1 - room}: give a larger --max-model-len.")
        if not 1 <= positions <= room:
            raise ConfigError(f"--positions must be from 1 to {room}: the context holds "
                              f"{engine.config.max_model_len} tokens.")
        self._positions = positions
        self._runs = 0
        self._seen: dict[int, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
        """Of the run: by position, the draft's tokens before a row, and its logits."""

    def compare(self, rows: int) -> Iterator[Compared]:
        """Every circumstance with plain decoding; the first of them runs when the first is asked for."""
        text, logits, cache, _ = self._run(Circumstance("plain"), [])
        plain = [logits[at][0][1] for at in sorted(logits)][:len(text)]
        for one in circumstances(rows):
            own, again, content, accepted = self._run(one, text)
            found = Compared(one.name, same_text=own == text, accepted=accepted)
            for at, want in enumerate(plain):
                for path, got in again.get(len(self._prompt) + at, ()):
                    if path == tuple(text[at - len(path):at]) and own[:at] == text[:at]:
                        _hold(found, at, want, got)
            for want, got in zip(cache, content):
                both = [(a, b) for a, b in zip(want, got) if a is not None and b is not None]
                found.kv_positions += len(both)
                found.kv_equal += sum(a == b for a, b in both)
            yield found

    def _run(self, how: Circumstance, text: list[int]) -> tuple[list[int], Any, list[list[bytes | None]], int]:
        """Output tokens, logits by position, what the cache holds of each position, and drafts that stood."""
        engine = self._engine
        self._runs += 1
        self._seen = {}
        # A salt of its own: nothing is found in the cache that another run has computed.
        common: dict[str, Any] = {"max_tokens": self._positions + MOST_ROWS, "ignore_eos": True, "temperature": 1.0,
                                  "trace": True, "cache_salt": f"verify {self._runs}"}
        names = []
        if how.company:
            names += [engine.add([*self._prompt[index + 1:], *self._prompt[:index]],
                                 SamplingParams(seed=SEED + 1 + index, **common), speculation=None)
                      for index in range(COMPANY)]
        if how.chunked:
            while engine.scheduler.config.max_batch_tokens > PROMPT // 2 and engine.scheduler.shrink():
                pass
        # A script that goes on behind the text lets the last drafts be as long as the first.
        draft = how.draft and how.draft | {"tokens": [*text, *text]}
        name = engine.add(self._prompt, SamplingParams(seed=SEED, **common), speculation=draft)
        names.append(name)
        sequence = engine.scheduler.sequences(name)[0]
        engine.decider.tap = self._note
        try:
            while sequence.output_len < self._positions and engine.record(name).open:
                engine.step()
            error = engine.record(name).error
            if error is not None:
                raise error
            stats = engine.record(name).speculation
            return (sequence.tokens[len(self._prompt):][:self._positions], self._seen, self._content(sequence),
                    0 if stats is None else stats.accepted)
        finally:
            engine.decider.tap = None
            for one in names:
                engine.cancel(one)
                engine.take(one)

    def _note(self, logits: torch.Tensor, rows: SampleRows) -> None:
        for row, values in zip(rows, logits):
            if row.state.seed == SEED:
                self._seen.setdefault(row.position, []).append((tuple(row.path), values.detach().float().cpu().clone()))

    def _content(self, sequence: Sequence) -> list[list[bytes | None]]:
        """Of each cache group, by position, the bytes of its keys and values in every layer; None: it is held no more,
        beyond a window."""
        engine, storage = self._engine, self._engine.storage
        storage.apply(*engine.scheduler.take_transfers())
        if storage.device.type == "cuda":
            torch.cuda.synchronize(storage.device)
        size, length = storage.block_size, len(self._prompt) + self._positions - 1
        extra = {id(tensor) for tensor in storage.extra.values()}
        found = []
        for planes, blocks in zip(storage.planes, sequence.allocation.blocks):
            held = [at for at in range(length) if blocks[at // size]]
            slots = torch.tensor([blocks[at // size] * size + at % size for at in held], device=storage.device)
            parts = [plane[slots].contiguous().view(torch.uint8).cpu().reshape(len(held), -1)
                     for plane in planes if id(plane) not in extra]
            whole = torch.cat(parts, 1).numpy()
            content: list[bytes | None] = [None] * length
            for at, row in zip(held, whole):
                content[at] = row.tobytes()
            found.append(content)
        return found


def _hold(found: Compared, at: int, want: torch.Tensor, got: torch.Tensor) -> None:
    found.positions += 1
    if torch.equal(want, got):
        found.equal += 1
        return
    if found.first_difference is None or at < found.first_difference:
        found.first_difference = at
    found.largest_difference = max(found.largest_difference, float((want - got).abs().max()))
    found.argmax_differs += int(want.argmax() != got.argmax())
    p, q = torch.log_softmax(want.double(), -1), torch.log_softmax(got.double(), -1)
    found.kl = max(found.kl, float((p.exp() * (p - q)).sum()))


def _prompt(engine: Engine) -> list[int]:
    """Some tokens of a text, or of nothing where the model has no tokenizer."""
    if engine.tokenizer is not None:
        tokens = engine.tokenizer.encode(PASSAGE * 3)
    else:
        tokens = [(31 * i + 7 * i * i + 5) % engine.model.config.vocab_size for i in range(PROMPT)]
    return tokens[:PROMPT]


def verify_steps(engine: Engine, model: str, positions: int, rows: int) -> BitsReport:
    """All circumstances."""
    if not LEAST_ROWS <= rows <= MOST_ROWS:
        raise ConfigError(f"--rows must be from {LEAST_ROWS} to {MOST_ROWS}, got {rows}.")
    setup = engine.setup
    report = BitsReport(model, str(engine.storage.device), setup.kernels, setup.dtype, setup.quantization,
                        setup.kv_dtype, setup.deterministic)
    report.compared.extend(StepBits(engine, positions).compare(rows))
    return report
