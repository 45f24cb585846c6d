"""The rows of a step that are sampled from, plain and drafted alike, each with what its grammar says there."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.engine.schedule.sequence import Sequence, Status
from paceline.engine.schedule.step import RowGroup
from paceline.errors import RequestError
from paceline.sampling.masks import Mask, row_mask
from paceline.sampling.processors import SampleRow
from paceline.sampling.state import SampleState


class SampleRows(list[SampleRow]):
    """Grows group by group."""

    __slots__ = ("errors",)

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, RequestError] = {}
        """Rows whose grammar failed. It matters where the text comes to them, and there only."""

    def add(self, state: SampleState, position: int, path: Seq[int] = ()) -> None:
        mask = None
        if state.grammar is not None:
            try:
                mask = state.grammar.mask(path)
            except Exception as problem:
                self.errors[len(self)] = problem if isinstance(problem, RequestError) else RequestError(
                    f"The grammar failed at position {position} ({type(problem).__name__}: {problem}); simplify it.")
        self.append(SampleRow(state, position, path, mask))

    def add_draft(self, group: RowGroup) -> None:
        """One row per draft node and one for the token before them, each knowing the draft tokens above it."""
        state, draft = group.seq.state, group.draft
        assert draft is not None
        base = first_drafted(group)
        self.add(state, base)
        paths: list[list[int]] = []
        for token, parent in zip(draft.tokens, draft.parents):
            path = [*paths[parent], token] if parent >= 0 else [token]
            paths.append(path)
            self.add(state, base + len(path), path)


def first_drafted(group: RowGroup) -> int:
    """Absolute position of the first token a group's draft is about: where its drafting cycle started."""
    return group.start + len(group.tokens) - (0 if group.draft is None else len(group.draft))


def masked_by_host(seq: Sequence) -> bool:
    """Whether only the host can say what may come next: it follows the text for bad words, repeated n-grams and
    structures."""
    state: SampleState = seq.state
    return state.bad_words is not None or state.ngrams is not None or seq.request.params.structure is not None


def row_masks(groups: Seq[RowGroup]) -> list[Mask | None] | None:
    """The host's mask of each row that the groups sample from, in their order; no mask where all may come. None: a
    grammar failed, which is the host's to tell."""
    masks: list[Mask | None] = []
    for group in groups:
        count = group.sampled_rows
        if not count or group.seq.status is Status.FINISHED or not masked_by_host(group.seq):
            masks += [None] * count
            continue
        rows = SampleRows()
        if group.draft is None:
            rows.add(group.seq.state, group.start + len(group.tokens))
        else:
            rows.add_draft(group)
        if rows.errors:
            return None
        masks += [row_mask(row) for row in rows]
    return masks
