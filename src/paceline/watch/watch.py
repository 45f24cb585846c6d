"""DriftWatch: which requests are watched, when their shadows run, and what becomes of what they show."""

from __future__ import annotations

import logging
import random
import secrets
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any

from paceline.engine.core import Engine
from paceline.engine.decide.decision import Decision
from paceline.engine.records.metrics import StepTimes
from paceline.engine.records.record import BROKEN_OFF, Record
from paceline.engine.schedule.step import Step
from paceline.errors import PacelineError, RequestError
from paceline.speculation.verify import RULES
from paceline.watch.acceptance import AcceptanceWatch, Change
from paceline.watch.alarm import DISTRIBUTION, TEXT, AcceptanceChange, Alarm
from paceline.watch.martingale import THRESHOLD
from paceline.watch.shadow import EXACT_KL, ROUNDED_KL, Outcome, Shadow
from paceline.watch.witness import MethodLaws, RequestWitness

log = logging.getLogger("paceline.watch")

MOST_WAITING = 64
"""Finished requests whose shadows wait for room; the oldest is given up for a new one."""
MOST_TRIES = 3
"""How often a shadow may be put aside for others before it is given up."""
ALARMS_KEPT = 50
CHANGES_KEPT = 50


class DriftWatch:
    """An observer of an engine that also runs requests of its own there: shadows, one at a time, of the lowest
    priority, on nobody's account. Called on the engine's thread: make_way() before a step, attend() after it."""

    def __init__(self, engine: Engine, share: float, action: str = "off", *, seed: int | None = None) -> None:
        """`seed`: of which requests are watched, and of the tests' own randomness."""
        self.share = share
        self.action = action
        self.alarms: deque[Alarm] = deque(maxlen=ALARMS_KEPT)
        self.raised: Counter[tuple[str, str]] = Counter()
        """Alarms by kind and method."""
        self.changes: deque[AcceptanceChange] = deque(maxlen=CHANGES_KEPT)
        """What is no alarm."""
        self.changed: Counter[tuple[str, str]] = Counter()
        """Those by direction and method."""
        self.outcomes: Counter[str] = Counter()
        """Shadows by what came of them: equal, tie, different, read, interrupted, skipped."""
        self.acceptance = AcceptanceWatch()
        self.watched = 0
        self.tokens: Counter[str] = Counter()
        """Tokens of watched requests that were judged, by method."""
        self.spent = 0
        """Tokens that shadows had computed, of prompts (less what the cache had) and of texts."""
        self.divergence = (0, 0.0, 0.0)
        """Positions at which distributions were compared, the sum of their KL, and the highest."""
        self._engine = engine
        self._rng = random.Random(secrets.randbits(64) if seed is None else seed)
        self._laws: dict[tuple[str, str], MethodLaws] = {}
        """By method and rule."""
        self._last: dict[tuple[str, str], tuple[str, int]] = {}
        """The id and the seed of the newest watched request of each."""
        self._waiting: deque[Shadow] = deque()
        self._running: Shadow | None = None
        self._failed = False
        engine.observers.add(self)

    @classmethod
    def of(cls, engine: Engine) -> DriftWatch | None:
        """What the engine's options ask for."""
        config = engine.config
        return cls(engine, config.watch_share, config.watch_action) if config.watch_share else None

    # ---------------------------------------------------------------- what it sees

    def admitted(self, record: Record) -> None:
        stats = record.speculation
        if self._failed or stats is None or stats.failure is not None or stats.lossy:
            return
        if self._rng.random() >= self.share:
            return
        key = stats.method, stats.rule
        laws = self._laws.get(key)
        if laws is None:
            laws = self._laws[key] = MethodLaws(stats.rule, random.Random(self._rng.getrandbits(64)))
        self.watched += 1
        self._last[key] = record.request.id, record.request.seed
        record.witness = RequestWitness(laws, stats.rule)

    def stepped(self, step: Step, decisions: Seq[Decision], started: float, times: StepTimes) -> None:
        pass

    def closed(self, record: Record) -> None:
        stats = record.speculation
        if self._failed or stats is None:
            return
        change = self.acceptance.observe(stats.method, sum(stats.by_depth), sum(stats.reached_by_depth))
        if change is not None:
            self._note(change, record)
        if isinstance(record.witness, RequestWitness):
            if RULES[stats.rule].reads_q:
                self.tokens[stats.method] += record.metrics.output_tokens
            self._wait(Shadow(record, record.witness, self._engine.kernels.deterministic))

    def _wait(self, shadow: Shadow) -> None:
        if not shadow.worth_it:
            return  # in a crowd hardly anybody is drafted for: most texts were decoded plainly already
        if not self._fits(shadow):
            self.outcomes["skipped"] += 1
            return
        self._waiting.append(shadow)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self.outcomes["skipped"] += 1

    # ---------------------------------------------------------------- shadows

    @property
    def pending(self) -> bool:
        """Whether shadows run, or wait for room."""
        return self.running or (not self._failed and bool(self._waiting))

    @property
    def running(self) -> bool:
        """Whether one of them does."""
        return not self._failed and self._running is not None

    def make_way(self) -> None:
        """A shadow that stands in somebody's way is put aside."""
        self._guarded(self._make_way)

    def _make_way(self) -> None:
        shadow = self._running
        if shadow is None or not self._engine.record(shadow.id).open:
            return
        sequences = self._engine.scheduler.sequences(shadow.id)
        begun = any(seq.seated for seq in sequences)
        reading = any(seq.computed < seq.prompt_len for seq in sequences)
        if self._crowded() or (reading and self._engine.scheduler.queue_length):
            self._engine.cancel(shadow.id)
            self._collect()
            shadow.tries += begun
            if shadow.tries < MOST_TRIES:
                self._waiting.appendleft(shadow)

    def attend(self) -> None:
        """Judge what has ended, start what there is room for."""
        self._guarded(self._attend)

    def _guarded(self, action: Callable[[], None]) -> None:
        """A watch that breaks ends here: no request is to hear of it."""
        if self._failed:
            return
        try:
            action()
        except Exception as problem:
            self._failed = True
            log.error("the drift watch failed, and watches no more until the engine is made anew", exc_info=problem)
            with suppress(Exception):
                self._stop()

    def _attend(self) -> None:
        for (method, rule), laws in self._laws.items():
            for kind, law in laws.laws.items():
                if law.evidence >= THRESHOLD and (kind, method) not in self.raised:
                    self._raise(Alarm(kind, method, rule, law.count, _broken_law(kind, law.evidence),
                                      *self._last[method, rule]))
        self._collect()
        while self._waiting and self._running is None and self._room():
            self._start(self._waiting.popleft())

    def stop(self) -> None:
        """Nothing of it runs when this returns."""
        self._guarded(self._stop)

    def _stop(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            self._engine.cancel(self._running.id)
            self._collect()

    def _start(self, shadow: Shadow) -> None:
        request = shadow.request
        if request.speculation is not None and request.speculation.method in self._engine.suspended:
            return
        own = request.adapter
        try:
            if own is not None and self._engine.adapters.get(own.name) != own:
                raise RequestError(f"The adapter {own.name!r} is another by now.", "adapter")
            prepared = self._engine.prepare(shadow.prompt(), shadow.params())
            # Clients choose ids: none may meet this one.
            shadow.id = self._engine.admit(
                prepared, speculation=None, request_id=f"shadow-{secrets.token_hex(16)}",
                adapter=None if own is None else own.name, tenant=request.tenant, shadow=True)
            self._running = shadow
        except PacelineError:  # its adapter is gone, or there is no room after all
            self.outcomes["skipped"] += 1

    def _collect(self) -> None:
        shadow = self._running
        if shadow is None or self._engine.record(shadow.id).open:
            return
        self._running = None
        record = self._engine.take(shadow.id)
        metrics = record.metrics
        if metrics.first_scheduled is not None:
            self.spent += metrics.prompt_tokens - metrics.cached_tokens + metrics.output_tokens
        if record.error is not None or any(one.finish_reason in BROKEN_OFF for one in record.emitters):
            self.outcomes["interrupted"] += 1
            return
        self._judge(shadow, shadow.judge(record))

    def _judge(self, shadow: Shadow, outcome: Outcome) -> None:
        if not shadow.reads:
            self.tokens[shadow.method] += outcome.tokens
        count, total, highest = self.divergence
        self.divergence = (count + len(outcome.divergences), total + sum(outcome.divergences),
                           max([highest, *outcome.divergences]))
        request, tokens = shadow.request, self.tokens[shadow.method]
        if outcome.difference is not None and not outcome.tie:
            self.outcomes["different"] += 1
            self._raise(Alarm(TEXT, shadow.method, shadow.rule, tokens, outcome.difference, request.id, request.seed))
            return
        self.outcomes["tie" if outcome.tie else "read" if shadow.reads else "equal"] += 1
        most = max(outcome.divergences, default=0.0)
        if most > (EXACT_KL if shadow.exact else ROUNDED_KL):
            self._raise(Alarm(DISTRIBUTION, shadow.method, shadow.rule, tokens,
                              f"a verify step's distribution is {most:.3g} nats from the plain step's", request.id,
                              request.seed))

    # ---------------------------------------------------------------- room

    @property
    def _seats(self) -> int:
        """Those that may be taken while a shadow runs, its own included."""
        return max(1, self._engine.config.max_num_seqs // 2)

    def _fits(self, shadow: Shadow) -> bool:
        """Whether there would be room for it if nobody else were there."""
        config = self._engine.config
        return shadow.samples <= self._seats and shadow.most_tokens <= config.kv_blocks // 2 * config.block_size

    def _crowded(self) -> bool:
        """Whether those who run and wait, shadows included, take more than half of the seats, or of the blocks."""
        scheduler, usage = self._engine.scheduler, self._engine.cache.usage()
        return len(scheduler.running) + scheduler.queue_length > self._seats or usage.used > usage.total // 2

    def _room(self) -> bool:
        """Nobody waits or has a prompt read, and the engine has enough to spare."""
        scheduler = self._engine.scheduler
        return (not scheduler.queue_length and len(scheduler.running) + self._waiting[0].samples <= self._seats
                and not any(seq.computed < seq.prompt_len for seq in scheduler.running) and not self._crowded())

    # ---------------------------------------------------------------- consequences

    def _note(self, change: Change, record: Record) -> None:
        stats = record.speculation
        assert stats is not None
        note = AcceptanceChange(stats.method, stats.rule, *change, at=self._engine.clock())
        self.changes.append(note)
        self.changed[note.direction, note.method] += 1
        log.info("%s", note.sentence())

    def _raise(self, alarm: Alarm) -> None:
        off = self.action == "off"
        alarm = Alarm(alarm.kind, alarm.method, alarm.rule, alarm.tokens, alarm.evidence, alarm.request, alarm.seed,
                      self._engine.clock(), off)
        self.alarms.append(alarm)
        self.raised[alarm.kind, alarm.method] += 1
        log.error("%s", alarm.sentence())
        if off and alarm.method not in self._engine.suspended:
            self._engine.suspend(alarm.method, f"switched off by the drift watch ({alarm.kind}: {alarm.evidence})")

    def report(self) -> dict[str, Any]:
        """Everything it knows, in plain types and without a word of anybody's text."""
        count, total, highest = self.divergence
        return {"share": self.share, "action": self.action, "watched": self.watched, "shadows": dict(self.outcomes),
                "tokens": dict(self.tokens), "shadow_tokens": self.spent,
                "kl": {"positions": count, "mean": total / count if count else 0.0, "highest": highest},
                "evidence": [{"method": method, "rule": rule, "law": kind, "nats": law.evidence, "count": law.count}
                             for (method, rule), laws in self._laws.items() for kind, law in laws.laws.items()
                             if law.count],
                "acceptance": {method: one.mean for method, one in self.acceptance.methods.items()},
                "raised": [{"kind": kind, "method": method, "count": count}
                           for (kind, method), count in self.raised.items()],
                "alarms": [alarm.as_dict() for alarm in self.alarms],
                "changed": [{"direction": direction, "method": method, "count": count}
                            for (direction, method), count in self.changed.items()],
                "changes": [change.as_dict() for change in self.changes]}


def _broken_law(kind: str, nats: float) -> str:
    said = {"drafted": "drafted tokens do not follow the q they are declared with: the drafter samples otherwise than "
                       "it says",
            "accepted": "drafts are not accepted as often as p and q overlap",
            "emitted": "the text does not follow the target's distribution"}[kind]
    strength = "a token came whose probability is 0" if nats == float("inf") else f"evidence {nats:.1f} nats"
    return f"{said} ({strength})"
