"""Control: how much to draft for everybody in the next step. More where it pays, nothing where it does not.

Nothing here can change a text: under coupled verification every draft gives the same tokens, and under the rejection
rules only what is decided before drafting (the depth) is decided here; drafts that were sampled are never cut by value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.speculation.acceptance import BEST, outcomes, verdicts
from paceline.speculation.controller import Ahead, Ask, Offer
from paceline.speculation.drafter import Budget, Drafter, Needs, Observation
from paceline.speculation.exploration import KNOWN, Allowance, tellers
from paceline.speculation.forecast import worthwhile
from paceline.speculation.history import Histories, History, Pause, Traits
from paceline.speculation.joint import Block, best_choice, blocks
from paceline.speculation.proof import Proof
from paceline.speculation.spec import Speculation
from paceline.speculation.step_cost import Load, StepCost
from paceline.speculation.tree import DraftTree

WINDOW = 4
"""Drafts that a drafter with a window to fill is tried for at a time: the first ones cannot be any good."""
SPEED_MEMORY = 0.97
LEAST_WIN = 0.02
"""Tokens that the drafts of a step must be expected to win to be sent. For those that do not tell what they are worth,
of each token that comes anyway: in a crowd what is known of costs is not more exact than that."""
CHEAP = 0.02
"""Share of a step that asking may take though it saves less; where it takes more, it has to save as much."""
HARDLY = 0.25
"""Of its time, what even that has to save: in a crowd where no row is cheap enough for any draft, nobody is asked."""
LEAST_SAVED = 0.03
"""Of a step, what drafters that take more than next to nothing have to save beyond their own time, once something is
known of them: what rows take is not known any better."""
RELUCTANCE = 0.1
"""By how much more than it costs a drafter must promise to be asked again once it was not worth it: forecasts waver."""
BEHIND = 2.0
"""Times as much that a token counts of a request which is slower than its target."""
SANGUINE = 2.0
"""Times its cost that a draft of a method is taken to save of which nothing is known: it is tried some times."""
SPAN = 4
"""Rows over which the price of one is taken at least: between neighbours the curve is too rough."""
NEGLIGIBLE = 1e-3
ROUNDS = 3
"""In which the best of many ratios is found: each begins with the speed that the choice of the one before has."""
MANY_TIMES = 10.0
"""What prompts should take that a step must take for it to tell of drafts: that is not known as exactly."""
SHORT = 3e-3
"""Seconds of plain steps that tell of drafts: in shorter ones it is what the host happens to do that is measured."""
REST = 8
"""Steps at most, half as many as there are sequences, for which a company is not weighed again once nobody in it was to
be drafted for: weighing a crowd takes as long as a drafter would."""
DEAR_OPENING = 4.0
"""Steps' worth of time that a method without prospects may take for a request's first draft, just to try."""


class _ControlState:
    """One sequence."""

    __slots__ = ("branching", "by_value", "history", "method", "needs", "nodes", "off", "opened", "opening", "pause",
                 "silent", "tokens", "tries", "wish")

    def __init__(self, wish: Speculation, needs: Needs, method: History, tokens: int) -> None:
        """`method`: what all requests of its scope that use the drafter's method taught."""
        self.wish, self.needs, self.method, self.tokens = wish, needs, method, tokens
        self.by_value = not needs.probes and (wish.verify == "coupled" or not needs.samples)
        """Its drafts may be chosen by their scores: they are there to be accepted, and not sampled for a rule that
        would mind."""
        self.opened = False
        """There was a draft."""
        self.opening = 0.0
        """Seconds of drafting until then."""
        self.history = History(method)
        self.pause = Pause()
        self.off = False
        """It was not worth it, when it was last weighed."""
        self.branching = False
        """Some proposal was no chain: from then on nodes are counted instead of depths."""
        self.nodes = 0
        """Of the last proposal."""
        self.silent = 0
        """Times in a row that there was none."""
        self.tries = 0
        """That are left of those which were granted."""

    @property
    def scored(self) -> bool:
        """Its drafts tell what they are worth, as far as is known: they are weighed when they are there."""
        return self.by_value and self.history.traits.scored is True

    @property
    def unknown(self) -> bool:
        """Nobody's drafts have told yet what the method is good for."""
        return self.method.cycles < (WINDOW * KNOWN if self.needs.probes else KNOWN)


class AdaptiveController:
    """All drafts of a step by goodput: expected tokens over expected time, searched over every number of rows.

    Acceptance comes from each request's own history, which starts from that of its method and scope in this engine and
    forgets within some 20 cycles; time from the measured step cost. Drafters that score their tokens are asked where
    that was worth its time, and of all their drafts together the nodes are sent that bring more than they cost at the
    present speed. Others' drafts are sized before they are made, by the same choice.
    """

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = StepCost() if cost is None else cost
        self.allowance = Allowance()
        self._methods = Histories()
        self._states: dict[Hashable, _ControlState] = {}
        self._asked: dict[Traits, tuple[int, float]] = {}
        """By drafter, since the last budgets: sequences that were asked about, and seconds."""
        self._speeds: dict[int, tuple[float, float]] = {}
        """By company: seconds that plain decoding would have taken, and that were taken, lately."""
        self._proof = Proof()
        self._forced = self._drafts = False
        """Somebody is drafted for whatever it costs; somebody because it should pay."""
        self._rest = ((0, 0), 0)
        """How many ran and asked, and the steps for which nobody of such a company is weighed."""

    def begin(self, sequence: Hashable, drafter: Drafter, wish: Speculation, tokens: int = 0,
              scope: str = "") -> None:
        self._rest = ((0, 0), 0)
        self._states[sequence] = _ControlState(wish, drafter.needs, self._methods.of(drafter.name, scope), tokens)

    def release(self, sequence: Hashable) -> None:
        self._states.pop(sequence, None)

    # ---------------------------------------------------------------- before there are drafts

    def budgets(self, asks: Sequence[Ask], ahead: Ahead) -> list[Budget | None]:
        for traits, (sequences, seconds) in self._asked.items():
            traits.rounds.observe(sequences, seconds)
        self._asked.clear()
        self._forced = self._drafts = False
        if ahead.most <= 0:
            return [None] * len(asks)
        states = [self._states[ask.sequence] for ask in asks]
        self._forced = not all(state.wish.adaptive for state in states)
        found: list[Budget | None] = [None if state.wish.adaptive else Budget(state.wish.k, state.wish.nodes)
                                      for state in states]
        # What a plain step takes is what everything else is weighed against: it is measured first.
        open = [place for place, state in enumerate(states) if state.wish.adaptive] if self._measured(ahead) else []
        if open and self._proof.goes_without(ahead.running):  # but for who is behind: drafts may cost others time
            open = [place for place in open if asks[place].behind]
        if not open or self._rests((ahead.running, len(open))):
            return found
        pace = self._pace(ahead)
        scored = [place for place in open if states[place].scored]
        if pace * self._row(ahead, SPAN) < BEST:  # else no draft is as sure as it would have to be
            scored = self._worth_asking(scored, states, asks, ahead, pace)
        else:
            scored = []
        sized = [place for place in open if not states[place].scored]
        sizes = {place: size for place, size in zip(sized, self._sizes(sized, states, asks, ahead)) if size}
        # All pay for as many rows as there may be drafts: a few that are cheap are no bargain for a crowd.
        price = pace * self._row(ahead, max(SPAN, min(len(scored) + len(sizes), ahead.most)))
        for place in scored:
            wish = states[place].wish
            found[place] = Budget(wish.k, wish.nodes, price, pace, self.allowance)
        for place, size in sizes.items():
            found[place] = self._sized(states[place], size, price, pace)
        self._drafts = any(found[place] for place in open)
        if not any(found):
            self._rest = ((ahead.running, len(open)), min(REST, ahead.running // 2))
        return found

    def _rests(self, company: tuple[int, int]) -> bool:
        rested, left = self._rest
        self._rest = (rested, left - 1)
        return rested == company and left > 0

    def _measured(self, ahead: Ahead) -> bool:
        return self.cost.knows(ahead.running)

    def _row(self, ahead: Ahead, span: int) -> float:
        """Seconds of a row, on average over the next so many."""
        return (self.cost(ahead.rows + span) - self.cost(ahead.rows)) / span

    def _worth_asking(self, places: Sequence[int], states: Sequence[_ControlState], asks: Sequence[Ask], ahead: Ahead,
                      pace: float) -> list[int]:
        """Those whose drafters score their drafts and should save more than they take, drafter by drafter: many asked
        together share its time. Of the others some are asked to see whether that has changed. Of each drafter's no
        more than may have a row."""
        asked: list[int] = []
        by_drafter: dict[int, list[int]] = {}
        for place in places:
            by_drafter.setdefault(id(states[place].history.traits), []).append(place)
        step = self.cost(ahead.rows, ahead.context)
        for own in by_drafter.values():
            rounds = states[own[0]].history.traits.rounds
            count = min(len(own), ahead.most)
            seconds = rounds(count) if rounds.measured else 0.0
            guess = SANGUINE * seconds / count
            worths = {place: self._worth(states[place], ahead.running, guess) for place in own}
            if count < len(own):
                own = sorted(own, key=lambda place: (
                    not asks[place].behind, -worths[place], states[place].history.worth(ahead.running).asked))[:count]
                worths = {place: worths[place] for place in own}
            if seconds <= CHEAP * step and sum(worths.values()) >= HARDLY * seconds:
                asked += own
                continue
            own.sort(key=lambda place: -worths[place])
            count = worthwhile([pace * worths[place] for place in own], [pace], rounds)
            told = any(not states[place].unknown for place in own[:count])
            if told and sum(worths[place] for place in own[:count]) < rounds(count) + LEAST_SAVED * step:
                count = 0
            strangers = tellers(ahead.running)
            for rank, place in enumerate(own):
                state = states[place]
                state.off = rank >= count
                if state.unknown and state.needs.runs_model and state.method.worth(ahead.running).asked < KNOWN:
                    strangers -= 1
                    if strangers >= 0:
                        asked.append(place)
                elif not state.off:
                    state.pause.forgive()
                    asked.append(place)
                elif self._tried(state, rounds(1), ahead):
                    asked.append(place)
        return sorted(asked)

    def _worth(self, state: _ControlState, running: int, guess: float) -> float:
        worth = state.history.worth(running).expected(guess)
        return worth - RELUCTANCE / (1.0 + RELUCTANCE) * abs(worth) if state.off else worth

    def _sizes(self, places: Sequence[int], states: Sequence[_ControlState], asks: Sequence[Ask],
               ahead: Ahead) -> list[int]:
        """For those whose drafts do not tell what they are worth: the size (depth of a chain, nodes of a tree) of each
        one's next draft with the best goodput of all together; 0: none. Every step promises the same, so it is plain
        decoding that they have to beat, and their own speed by which they are sized."""
        if not places:
            return []
        pace = ahead.running / self.cost(ahead.running, ahead.context)
        sizes = [0] * len(places)
        for _ in range(ROUNDS):
            drafts = [self._forecast(states[place], asks[place], pace, ahead.most) for place in places]
            choice = best_choice(drafts, ahead.rows, self.cost, pace, ahead.most)
            if choice.win <= LEAST_WIN * ahead.running:
                break
            sizes = choice.nodes
            pace += choice.win / self.cost(ahead.rows + sum(sizes), ahead.context)
        strangers, left = tellers(ahead.running), ahead.most - sum(sizes)
        step = self.cost(ahead.rows, ahead.context)
        for index, place in enumerate(places):
            state = states[place]
            least, draft_cost = drafts[index][0].nodes, state.history.traits.cost
            deep = state.wish.k if state.branching or state.needs.probes else least
            asking = draft_cost(deep) if draft_cost.measured else 0.0
            mute = state.silent >= KNOWN and asking > CHEAP * step
            if mute:  # what it has said before, here or elsewhere, is not what it will say now
                sizes[index] = 0
            state.off = not sizes[index]
            if state.unknown and not mute and not self._dear_to_open(state, ahead):
                strangers -= 1  # the others are told by these
                wanted = max(sizes[index], least)
                if strangers < 0 or wanted - sizes[index] > left:
                    wanted = 0
                left += sizes[index] - wanted
                sizes[index] = wanted
            elif sizes[index]:
                state.pause.forgive()
            elif left >= least and self._tried(
                    state, asking + self.cost(ahead.rows + least) - self.cost(ahead.rows), ahead):
                sizes[index] = least
                left -= least
        return sizes

    def _forecast(self, state: _ControlState, ask: Ask, pace: float, limit: int) -> list[Block]:
        """What the nodes of its next draft should gain, less the time of drafting them; of so many that may be cut."""
        wish, history = state.wish, state.history
        most = wish.k
        if state.needs.probes:
            most = state.nodes or wish.nodes
        elif state.branching:
            most = min(wish.nodes, max(4, 2 * state.nodes))
        if not state.needs.probes:
            most = min(most, limit)
        draft_cost = history.traits.cost if history.traits.cost.measured else None
        row = pace * self.cost.context.seconds * ask.context
        weight = (BEHIND if ask.behind else 1.0) / (1.0 + RELUCTANCE if state.off else 1.0)
        gains: list[float] = []
        alive, before = 1.0, 0.0
        for count, rate in enumerate((history.by_node if state.branching else history.by_depth).rates(most), 1):
            alive = rate if state.branching else alive * rate
            taken = 0.0 if draft_cost is None else draft_cost(wish.k if state.branching else count)
            gains.append(weight * alive - row - pace * (taken - before))
            before = taken
            if alive < NEGLIGIBLE and not state.needs.probes:
                break
        return blocks(gains, state.needs.probes)

    def _sized(self, state: _ControlState, size: int, price: float, pace: float) -> Budget:
        wish = state.wish
        if state.needs.probes:
            return Budget(wish.k, wish.nodes, price, pace, self.allowance)
        if state.branching:
            return Budget(wish.k, size, price, pace, self.allowance)
        return Budget(size, wish.nodes, price, pace, self.allowance)

    def _tried(self, state: _ControlState, seconds: float, ahead: Ahead) -> bool:
        """Whether somebody is drafted for though that should not pay: now and then, ever more rarely, and as far as
        the allowance goes."""
        if state.tries > 0:
            state.tries -= 1
            return True
        if not state.pause.over or self._dear_to_open(state, ahead):
            return False
        state.pause.begin()
        state.history.fade(ahead.running)  # what it knows of this text is old: others may know better
        state.history.traits.rounds.doubt()
        times = WINDOW if state.needs.probes else 1
        opening = 0.0 if state.opened else state.history.traits.opening(state.tokens)
        if not self.allowance.spend(times * seconds + opening):
            return False
        state.tries = times - 1
        return True

    def _dear_to_open(self, state: _ControlState, ahead: Ahead) -> bool:
        """Whether even the first draft of a request would take many steps' time: that of a model that has to read the
        prompt, as other requests have shown."""
        opening = state.history.traits.opening(state.tokens)
        return not state.opened and opening > DEAR_OPENING * self.cost(ahead.rows, ahead.context)

    # ---------------------------------------------------------------- once they are there

    def drafted(self, sequence: Hashable, depth: int, seconds: float, weighed: float = 0.0) -> None:
        state = self._states[sequence]
        if not state.opened:
            state.opening += seconds
        seconds -= weighed
        traits = state.history.traits
        traits.cost.observe(depth, seconds)
        others, theirs = self._asked.get(traits, (0, 0.0))
        self._asked[traits] = (others + 1, theirs + seconds)

    def judge(self, ask: Ask, draft: DraftTree | None, ahead: Ahead) -> Offer | None:
        state = self._states[ask.sequence]
        state.history.proposal = draft
        if draft is None:
            state.silent += 1
            if state.wish.adaptive and not state.needs.probes:  # nobody else's drafts are judged
                state.history.worth(ahead.running).learn(0.0)
            return None
        if not state.opened:
            state.opened = True
            state.history.traits.opening.observe(state.tokens, state.opening)
        state.branching = state.branching or not draft.is_chain
        state.nodes, state.silent = len(draft), 0
        state.history.traits.scored = draft.scores is not None
        by_value = state.by_value and (draft.q is None or state.wish.verify == "coupled")
        if draft.scores is None or not by_value or not state.wish.adaptive:
            return Offer(ask, draft, None)
        return Offer(ask, draft, state.history.by_score.worth(draft, NEGLIGIBLE)[1])

    def choose(self, offers: Sequence[Offer], ahead: Ahead) -> list[DraftTree | None]:
        decided = sum(len(offer.draft) for offer in offers if offer.chances is None)
        rows, left = ahead.rows + decided, max(0, ahead.most - decided)
        pace, read = self._pace(ahead), self.cost.context.seconds
        drafts = [blocks([(BEHIND if offer.ask.behind else 1.0) * chance - pace * read * offer.ask.context
                          for chance in (offer.chances or ())[:left]]) for offer in offers]
        choice = best_choice(self._told(offers, drafts, ahead.running), rows, self.cost, pace, left)
        nodes = choice.nodes if choice.win > LEAST_WIN else [0] * len(offers)
        added = sum(nodes)
        seconds = (self.cost(rows + added) - self.cost(rows)) / added if added else 0.0
        sent: list[DraftTree | None] = []
        for offer, taken in zip(offers, nodes):
            if offer.chances is None:
                sent.append(offer.draft)
                continue
            saved = sum(offer.chances[:taken]) / pace - taken * (seconds + read * offer.ask.context)
            worth = self._states[offer.ask.sequence].history.worth(ahead.running)
            worth.learn(max(0.0, saved) if offer.ask.behind else saved)  # for who is behind it may well cost more
            sent.append(offer.draft.trimmed(taken) if taken else None)
        return sent

    def _told(self, offers: Sequence[Offer], drafts: Sequence[Sequence[Block]],
              running: int) -> list[Sequence[Block]]:
        """Of methods of which nothing is known only the best drafts of some: what comes of them tells the others."""
        strangers = [place for place, offer in enumerate(offers)
                     if offer.chances is not None and self._states[offer.ask.sequence].unknown]
        strangers.sort(key=lambda place: -sum(offers[place].chances or ()))
        left_out = set(strangers[tellers(running):])
        return [() if place in left_out else own for place, own in enumerate(drafts)]

    # ---------------------------------------------------------------- when the step is over

    def learn(self, sequence: Hashable, observation: Observation) -> None:
        state = self._states.get(sequence)
        if state is None:
            return
        state.pause.passed(len(observation.tokens))
        proposal, sent = state.history.settled(), observation.draft
        if sent is not None:
            state.history.verified()
        if proposal is None or not observation.tokens:
            return
        if sent is None or state.wish.verify == "coupled":
            found = outcomes(proposal, observation.tokens)
        else:
            proposal, found = sent, verdicts(sent, observation.accepted)
        if not state.branching or (state.by_value and proposal.scores is not None):
            state.history.learn(proposal, found, state.by_value)
        elif sent is not None:
            state.history.learn_nodes(sent, observation.accepted)

    def stepped(self, load: Load, running: int, tokens: int, drafting: float, seconds: float = 0.0) -> None:
        if not self.cost.measured or not running:
            return
        taken = self.cost(load.rows, load.context) + drafting
        self.allowance.earn(taken, running)
        plain, spent = self._speeds.get(running.bit_length(), (0.0, 0.0))
        alone = self.plain_cost(running, load.context * running / load.rows)  # without the rows of drafts
        self._speeds[running.bit_length()] = (SPEED_MEMORY * plain + tokens * alone, SPEED_MEMORY * spent + taken)
        prompts = self.cost.prompt_seconds(load.prompt_rows, load.prompt_context)
        others = self._forced or (load.rows > running and not self._drafts)  # a grammar's, a recording's
        told = not others and seconds > MANY_TIMES * prompts and tokens > 0 and running * alone >= SHORT
        self._proof.observe(running, self._drafts, (seconds - prompts) / (tokens * alone) if told else None)

    def plain_cost(self, running: int, context: float = 0.0) -> float:
        return self.cost(running, context) / running if self.cost.measured else 0.0

    def _pace(self, ahead: Ahead) -> float:
        """Tokens a second, of all sequences together, at the speed reached so far in such company: at least that of
        plain decoding, which is always open."""
        plain, spent = self._speeds.get(ahead.running.bit_length(), (1.0, 1.0))
        speed = min(4.0, max(1.0, plain / spent)) if spent > 0.0 else 1.0
        return speed * ahead.running / self.cost(ahead.running, ahead.context)
