"""A controller asked and told as the engine does it, one sequence at a time."""

from __future__ import annotations

from paceline.speculation.control import AdaptiveController
from paceline.speculation.controller import Ahead, Ask
from paceline.speculation.drafter import Budget
from paceline.speculation.step_cost import Load
from paceline.speculation.tree import DraftTree


def timed(control: AdaptiveController, rows: int, seconds: float) -> None:
    """A step without prompts took so long."""
    control.cost.observe(Load(rows), seconds)


def budget(control: AdaptiveController, sequence: str = "s", running: int = 1) -> Budget | None:
    return control.budgets([Ask(sequence)], Ahead(running, running))[0]


def choose(control: AdaptiveController, draft: DraftTree | None, sequence: str = "s",
           running: int = 1) -> DraftTree | None:
    ahead = Ahead(running, running)
    offer = control.judge(Ask(sequence), draft, ahead)
    return None if offer is None else control.choose([offer], ahead)[0]


def stepped(control: AdaptiveController, rows: int, seconds: float, running: int, tokens: int,
            drafting: float = 0.0) -> None:
    timed(control, rows, seconds)
    control.stepped(Load(rows), running, tokens, drafting)
