"""suffix: what followed most often when a text ended like this, in this request or in any other of its scope.

The longest suffix of the text that occurred before is looked up in a suffix tree of the sequence itself (in which those
that began with the same prompt grow too as they are drafted for: the other samples of its request) and in the library
of what all requests of the same scope read and wrote. The longer it is, the more is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from paceline.speculation.by_prompt import ByPrompt
from paceline.speculation.drafter import Budget, DraftContext, Drafter, Needs, Observation
from paceline.speculation.options import MAX_NODES, Options
from paceline.speculation.sequence import DraftedSequence
from paceline.speculation.suffix_library import SuffixLibrary, Volume
from paceline.speculation.suffix_tree import Continuation, Reach, SuffixTree, Text, new_tree
from paceline.speculation.tree import DraftTree

DEPTH = 64
LIBRARY_TOKENS = 200_000
_WORK = 64
"""Tokens sorted into the library at each call, or sixteen times as many as it brings in: more than come with prompts,
little enough to go unnoticed."""


class _Prompt:
    """A prompt as a tree, in which the sequences that begin with it go on; made when one of them is first drafted for:
    in a crowd most never are."""

    def __init__(self, depth: int, tokens: list[int]) -> None:
        self.depth, self.tokens = depth, tokens

    @cached_property
    def tree(self) -> SuffixTree:
        return new_tree(self.depth)

    @cached_property
    def end(self) -> Text:
        end = self.tree.begin()
        self.tree.extend(end, self.tokens)
        return end


class _History:
    """A sequence in the tree of its prompt, and its way into the library."""

    __slots__ = ("prompt", "read", "seen", "text", "volume")

    def __init__(self, prompt: _Prompt, scope: str) -> None:
        self.prompt = prompt
        self.text: Text | None = None
        """In the prompt's tree, since it was first drafted for."""
        self.volume = Volume(scope)
        self.seen = self.read = len(prompt.tokens)
        """Tokens that the library, and the tree, know."""

    def news(self, tokens: list[int]) -> list[int]:
        """What came since the last call."""
        new = tokens[self.seen:]
        self.seen = len(tokens)
        return new

    def grown(self, tokens: list[int]) -> Text:
        """Where it ends in the tree, with all its tokens."""
        if self.text is None:
            self.text = self.prompt.tree.begin(self.prompt.end)
        if len(tokens) > self.read:
            self.prompt.tree.extend(self.text, tokens[self.read:])
            self.read = len(tokens)
        return self.text


class SuffixDrafter:
    """Drafts a chain, or with tree=True a tree of the most probable continuations.

    After a match of m tokens the draft holds at most factor * m + offset tokens, and it stops where the probability of
    the whole path (as counted) falls below min_prob. Of the sequence's own tree and the library's, the one with more
    expected accepted tokens is followed.
    """

    needs = Needs()

    def __init__(self, name: str = "suffix", library: SuffixLibrary | None = None, *, depth: int = DEPTH,
                 factor: float = 1.0, offset: float = 0.0, min_prob: float = 0.1, tree: bool = False) -> None:
        """`library` None: each sequence for itself."""
        self.name = name
        self._library = library
        self._depth = depth
        self._reach = Reach(depth // 2, factor, offset, min_prob, tree)
        self._histories: dict[DraftedSequence, _History] = {}
        self._prompts = ByPrompt(lambda tokens: _Prompt(depth, tokens))

    def begin(self, sequence: DraftedSequence) -> None:
        prompt, new = self._prompts.join(sequence)
        history = self._histories[sequence] = _History(prompt, sequence.scope)
        if new and self._library is not None:
            self._library.add(history.volume, sequence.tokens[:history.seen])
        self._learn(sequence)

    def observe(self, sequence: DraftedSequence, observation: Observation) -> None:
        self._learn(sequence)

    def release(self, sequence: DraftedSequence) -> None:
        self._histories.pop(sequence, None)
        self._prompts.leave(sequence)

    def _learn(self, sequence: DraftedSequence) -> None:
        history = self._histories[sequence]
        new = history.news(sequence.tokens)
        if self._library is not None:
            self._library.add(history.volume, new)
            self._library.work(max(_WORK, 16 * len(new)))

    def propose(self, sequences: Sequence[DraftedSequence], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets)]

    def _draft(self, sequence: DraftedSequence, budget: Budget) -> DraftTree | None:
        history = self._histories[sequence]
        text = history.grown(sequence.tokens)
        found = history.prompt.tree.draft_end(text, self._reach, budget.nodes, budget.depth)
        other = self._look_up(sequence, budget)
        if other is not None and other.expected > found.expected:
            found = other
        tokens = found.tokens
        return DraftTree(tokens, found.parents, self.name, scores=found.scores) if tokens else None

    def _look_up(self, sequence: DraftedSequence, budget: Budget) -> Continuation | None:
        """What followed the longest match in the library; of equally long ones the newest."""
        if self._library is None:
            return None
        best: Continuation | None = None
        longest = 0
        end = sequence.tokens[-self._reach.longest:]
        for tree in self._library.trees(sequence.scope):
            found = tree.draft(end, self._reach, budget.nodes, budget.depth, longest)
            if found.matched > longest:
                best, longest = found, found.matched
        return best


def build(method: str, options: Options, context: DraftContext) -> Drafter:
    named = options.named("library_tokens")
    tokens = options.integer("library_tokens", LIBRARY_TOKENS, 0, 10_000_000)
    library: SuffixLibrary | None = None
    if tokens:
        # One library an engine; whoever names another size sets it for all (and must be its operator: serve/params.py).
        library = context.shared.setdefault("suffix library", SuffixLibrary(LIBRARY_TOKENS, DEPTH))
        if named:
            library.capacity = max(tokens, _WORK)
    return SuffixDrafter(
        method, library, factor=options.number("factor", 1.0, 0.0, 64.0),
        offset=options.number("offset", 0.0, -64.0, float(MAX_NODES)),
        min_prob=options.number("min_prob", 0.1, 0.0, 1.0), tree=options.flag("tree", False))
