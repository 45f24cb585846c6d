"""A world without a model: an oracle names each next token, and a pretended KV memory proves what every row would read.

The runner is replaced by `World.run`, which carries out a step's moves, copies and row writes on a dictionary per
cache group, and on further ones for the host's memory. A slot holds (position, fingerprint of the salt and all tokens
up to there), so a row that would attend to anything but its own history is noticed at once, wherever it has been.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as Seq

from paceline.cache.manager import CacheManager
from paceline.cache.transfers import BlockCopy, Route, SlotMove
from paceline.engine.schedule.limits import SchedulerLimits
from paceline.engine.schedule.preemption import Preemption
from paceline.engine.schedule.scheduler import Scheduler
from paceline.engine.schedule.sequence import PENDING, Sequence, Status
from paceline.engine.schedule.step import GroupResult, RowGroup, Step
from paceline.kernels.groups import CacheGroup
from paceline.request import Request, SamplingParams, Tenant
from paceline.speculation.tree import DraftTree

VOCABULARY = 7
STOP = 6
Memory = dict[int, tuple[int, int]]
"""Of one cache group: slot -> what was written to it."""


def group(name: str, *, window: int | None = None, lookahead: int = 0) -> CacheGroup:
    return CacheGroup(name, (0,), 1, 1, window=window, lookahead=lookahead)


def oracle(tokens: list[int], seed: int) -> int:
    """The next token of any text: a pure function of all that came before and of the sample's seed."""
    return zlib.crc32(bytes(tokens) + seed.to_bytes(4, "little")) % VOCABULARY


def fingerprints(salt: str, tokens: list[int]) -> list[int]:
    """For each position, a number that depends on the salt and on every token up to it."""
    result, value = [], zlib.crc32(salt.encode())
    for token in tokens:
        value = hash((value, token))
        result.append(value)
    return result


class World:
    """Scheduler, cache and pretended memory, with the truth about every sequence kept beside them."""

    def __init__(self, cache: CacheManager, config: SchedulerLimits, preemption: str = "recompute") -> None:
        self.now = 0.0
        self.cache = cache
        self.scheduler = Scheduler(config, cache, lambda: self.now, Preemption(preemption))
        self.memory: list[Memory] = [{} for _ in cache.groups]
        self.swapped: list[Memory] = [{} for _ in cache.groups]
        self.cold: list[Memory] = [{} for _ in cache.groups]
        self.truth: dict[Sequence, list[int]] = {}
        self.over: set[Sequence] = set()
        """Sequences whose end was reported in a result (which may not be committed yet)."""
        self.flight: list[tuple[Step, list[GroupResult]]] = []
        self.everyone: list[Sequence] = []
        self.steps = 0
        self.rows = 0
        self.accepted = 0

    def add(self, prompt: list[int], max_tokens: int = 8, *, seed: int = 0, deadline: float | None = None,
            tenant: str = "", begun: Seq[int] = (), **params: object) -> list[Sequence]:
        """`begun`: how much each sample has said elsewhere; one that came to its end there does not come here."""
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        request = Request(f"r{len(self.everyone)}", list(prompt), sampling, seed, max_tokens, self.now, deadline,
                          tenant=Tenant(tenant))
        said = [self._said(prompt, seed + sample, count) for sample, count in enumerate(begun)]
        sequences = self.scheduler.add(request, [seed + i for i in range(sampling.n)], said=said)
        if said:
            sequences = [seq for seq, own in zip(sequences, said) if own is not None]
        self.everyone += sequences
        for seq in sequences:
            self.truth[seq] = list(seq.tokens)
        return sequences

    @staticmethod
    def _said(prompt: list[int], seed: int, count: int) -> list[int] | None:
        text = list(prompt)
        for _ in range(count):
            text.append(oracle(text, seed))
            if text[-1] == STOP:
                return None
        return text[len(prompt):]

    def launch(self) -> Step | None:
        """Schedule one step and run it at once: steps run in the order of scheduling, so later calls cannot tell."""
        step = self.scheduler.schedule()
        if step is not None:
            self.flight.append((step, self.run(step)))
        self.check()
        return step

    def commit(self) -> None:
        step, results = self.flight.pop(0)
        self.scheduler.commit(step, results)
        self.check()

    def fail(self) -> None:
        """The oldest step broke somewhere: the memory is junk, and the engine ends the requests it held."""
        step = self.flight[0][0]
        for rows in step.groups:
            self.scheduler.cancel(rows.seq.request.id)
        self.scheduler.fail(step)
        for memory in (*self.memory, *self.swapped, *self.cold):
            memory.clear()
        self.flight.clear()
        for seq in self.everyone:
            if seq.status is not Status.FINISHED:
                self.truth[seq] = list(seq.tokens)
                self.over.discard(seq)
        self.check()

    def turn(self) -> Step | None:
        step = self.launch()
        if step is not None:
            self.commit()
        return step

    def drain(self, limit: int = 5000, *, ahead: bool = False) -> None:
        """Run until nothing is left; too many steps mean that somebody starves."""
        for _ in range(limit):
            step = self.launch()
            if len(self.flight) > (1 if ahead and step is not None else 0):
                self.commit()
            elif step is None:
                break
        assert not self.scheduler.has_work(), "the scheduler still has work but makes no progress"
        self.check_outputs()

    def check(self) -> None:
        """Nothing leaks, and every count is right, at any moment."""
        running = self.scheduler.running
        swapped = [seq for seq in self.everyone if seq.swapped is not None]
        assert all(seq.status is Status.WAITING for seq in swapped)
        self.cache.check([seq.allocation for seq in running], [seq.swapped for seq in swapped])
        assert [seq.rank for seq in running] == sorted(seq.rank for seq in running)
        assert all(seq.seated == (seq.status is Status.RUNNING) for seq in self.everyone)

    def check_outputs(self) -> None:
        """Every finished sequence says exactly what the oracle would have said."""
        for seq in self.everyone:
            assert seq.status is Status.FINISHED
            expected = list(seq.request.prompt)
            for _ in range(seq.output_len):
                expected.append(oracle(expected, seq.seed))
            assert seq.tokens == expected
            if seq.finish_reason == "length":
                assert len(seq.tokens) == max(seq.limit, seq.prompt_len + seq.said)
            elif seq.finish_reason == "stop":
                assert seq.tokens[-1] == STOP
            else:
                assert seq.finish_reason in ("cancelled", "timeout")
            assert STOP not in seq.tokens[seq.prompt_len:-1]
        assert self.cache.usage().used == self.cache.usage().swap_used == 0

    def draft_in_place(self, seq: Sequence, rows: int) -> None:
        """A drafter on the target's own cache reads what is there and writes after it, before the next step."""
        self.transfer(*self.scheduler.take_transfers())
        start = seq.computed
        rows = min(rows, self.cache.max_blocks_per_seq * self.cache.block_size - start)
        marks = fingerprints(seq.scope, seq.tokens)
        for g, kind in enumerate(self.cache.groups):
            if not kind.lookahead:
                first = 0 if kind.window is None else max(0, start - kind.window + 1)
                for key in range(first, start):
                    assert self.memory[g].get(self._slot(seq, g, key)) == (key, marks[key])
        copies = self.cache.reserve(seq.allocation, start, start + rows)
        if copies is None:
            return
        self.transfer([], copies)
        for g, kind in enumerate(self.cache.groups):
            for position in range(start, start + rows if not kind.lookahead else start):
                self._write(seq, g, position, (-1, -1))
        self.check()

    def transfer(self, moves: list[SlotMove], copies: list[BlockCopy]) -> None:
        """Moves all at once, then copies one by one: what KVStorage.apply does to tensors."""
        read = [self.memory[move.group].get(move.source) for move in moves]
        for move, content in zip(moves, read):
            self._put(self.memory, move.group, move.target, content)
        assert len({(move.group, move.target) for move in moves}) == len(moves), "a slot is moved to twice"
        size = self.cache.block_size
        ways = {Route.WITHIN: (self.memory, self.memory), Route.SWAP_OUT: (self.memory, self.swapped),
                Route.SWAP_IN: (self.swapped, self.memory), Route.OFFLOAD: (self.memory, self.cold),
                Route.FETCH: (self.cold, self.memory)}
        for copy in copies:
            source, target = ways[copy.route]
            for offset in range(size):
                self._put(target, copy.group, copy.target * size + offset,
                          source[copy.group].get(copy.source * size + offset))

    def run(self, step: Step) -> list[GroupResult]:
        self.steps += 1
        self.rows += step.rows
        assert step.rows <= self.scheduler.config.max_batch_tokens
        assert len({group.seq for group in step.groups}) == len(step.groups)
        self.transfer(step.moves, step.copies)
        return [self._run_group(group) for group in step.groups]

    def _put(self, memory: list[Memory], group: int, slot: int, content: tuple[int, int] | None) -> None:
        assert slot >= self.cache.block_size, "the null block was written"
        if content is None:
            memory[group].pop(slot, None)
        else:
            memory[group][slot] = content
        limits = {id(self.swapped): self.cache.swap.most_blocks, id(self.cold): self.cache.cold.most_blocks}
        assert slot // self.cache.block_size <= limits.get(id(memory), slot), "the host keeps more than it may"

    def _slot(self, seq: Sequence, group: int, position: int) -> int:
        size = self.cache.block_size
        block = int(self.cache.tables[group][seq.allocation.seat, position // size])
        assert block, f"{seq} reads or writes position {position}, which it does not hold"
        return block * size + position % size

    def _write(self, seq: Sequence, group: int, position: int, content: tuple[int, int]) -> None:
        slot = self._slot(seq, group, position)
        pool, block = self.cache.pools[group], slot // self.cache.block_size
        assert pool.refs[block] == 1, "a row is written into a block that others hold too"
        assert not pool.cached[block], "a row is written into a block of the prefix cache"
        self._put(self.memory, group, slot, content)

    def _run_group(self, rows: RowGroup) -> GroupResult:
        seq, start = rows.seq, rows.start
        text = self.truth[seq]
        tokens = list(rows.tokens)
        if tokens[0] == PENDING:
            tokens[0] = text[-1]
        known = len(tokens) if rows.draft is None else 1
        if seq not in self.over:
            assert tokens[:known] == text[start:start + known]
        parents = rows.parents or list(range(-1, len(tokens) - 1))
        assert rows.draft is None or tokens[1:] == rows.draft.tokens
        paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            paths.append(([] if parent < 0 else paths[parent]) + [row])
        salt = seq.scope
        for row, path in enumerate(paths):
            line = text[:start] + [tokens[i] for i in path]
            marks = fingerprints(salt, line)
            position = start + len(path) - 1
            for g, kind in enumerate(self.cache.groups):
                if kind.lookahead:
                    continue
                self._write(seq, g, start + row, (position, marks[position]))
                first = 0 if kind.window is None else max(0, position - kind.window + 1)
                for key in range(first, position + 1):
                    physical = key if key < start else start + path[key - start]
                    assert self.memory[g].get(self._slot(seq, g, physical)) == (key, marks[key]), \
                        f"{seq} would read a stranger's KV at position {key}"
        result = self._sample(rows, tokens, parents)
        self._run_lookahead(rows, [0, *result.path] if rows.draft is not None else list(range(len(tokens))), tokens)
        return result

    def _run_lookahead(self, rows: RowGroup, kept: list[int], tokens: list[int]) -> None:
        """A drafter's own cache: entry i is written once the `lookahead` tokens after it are known."""
        seq, start = rows.seq, rows.start
        text = self.truth[seq][:start] + [tokens[row] for row in kept]
        marks = fingerprints(seq.scope, text)
        for g, kind in enumerate(self.cache.groups):
            ahead = kind.lookahead
            if not ahead:
                continue
            for entry in range(max(0, start - ahead, seq.allocation.sealed), len(text) - ahead):
                physical = entry if entry < start else start + kept[entry - start]
                self._write(seq, g, physical, (entry, marks[entry + ahead]))
            first = 0 if kind.window is None else max(0, start - ahead - kind.window + 1)
            for entry in range(first, len(text) - ahead):
                physical = entry if entry < start else start + kept[entry - start]
                assert self.memory[g].get(self._slot(seq, g, physical)) == (entry, marks[entry + ahead]), \
                    f"{seq} would read a drafter's entry made for other tokens at position {entry}"

    def _sample(self, rows: RowGroup, tokens: list[int], parents: list[int]) -> GroupResult:
        seq, text = rows.seq, self.truth[rows.seq]
        if seq in self.over:
            return GroupResult([0])
        wants_prompt = (seq.request.params.prompt_logprobs is not None and rows.start < seq.prompt_len
                        and len(text) == seq.prompt_len + seq.said)
        if rows.draft is None and rows.start + len(tokens) < len(text):
            assert rows.logits_from == (0 if wants_prompt else len(tokens)), "an unfinished prompt needs no logits"
            return GroupResult([])
        last = 0 if rows.draft is not None else len(tokens) - 1
        assert rows.logits_from == (0 if wants_prompt else last)
        new: list[int] = []
        path: list[int] = []
        row = last
        while seq.limit > seq.prompt_len:
            token = oracle(text + new, seq.seed)
            new.append(token)
            row = next((i for i, parent in enumerate(parents) if i > last and parent == row and tokens[i] == token), -1)
            if row < 0:
                break
            path.append(row)
        self.accepted += len(path)
        result = self._end(seq, new, path)
        siblings = []
        for sibling in rows.siblings:
            first = [] if sibling.limit == sibling.prompt_len else [oracle(self.truth[sibling], sibling.seed)]
            siblings.append(self._end(sibling, first, []))
        result.siblings = siblings
        return result

    def _end(self, seq: Sequence, new: list[int], path: list[int]) -> GroupResult:
        text, finish = self.truth[seq], None
        if STOP in new:
            new = new[:new.index(STOP) + 1]
            finish = "stop"
        if len(text) + len(new) >= seq.limit:
            kept = new[:seq.limit - len(text)]
            finish = finish if len(kept) == len(new) and finish else "length"
            new = kept
        text += new
        if finish is not None:
            self.over.add(seq)
        return GroupResult(new, path, finish)


def propose(chance: random.Random, seq: Sequence) -> DraftTree:
    """A draft that is right, wrong or a mixture, as a chain or as a tree."""
    text, tokens, parents = list(seq.tokens), [], []
    right = chance.random()
    tip = -1
    for _ in range(chance.randint(1, 6)):
        token = oracle(text, seq.seed)
        if chance.random() > right:
            token = chance.randrange(VOCABULARY)
        parent = tip if chance.random() < 0.7 else chance.randrange(-1, len(tokens))
        tokens.append(token)
        parents.append(parent)
        if parent == tip and token == oracle(text, seq.seed):
            text.append(token)
            tip = len(tokens) - 1
    return DraftTree(tokens, parents)
