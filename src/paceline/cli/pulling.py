"""What every command has that takes a model: both ways to name it, and `--pull`, by which what is not on this machine
is fetched before the command runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import typer

from paceline.cli.naming import both_ways
from paceline.cli.terminal import loading_bars

Pull = Annotated[bool, typer.Option("--pull", help="Fetch the model from the hub first, if it is not on this machine.",
                                    rich_help_panel="Engine")]


def pulls(command: Callable[..., None],
          also: Callable[[Mapping[str, Any]], Iterable[str | None]] = lambda given: ()) -> Callable[..., None]:
    """The command with these. `also`: further models that it takes, by what it is given."""
    command = both_ways(command)

    @functools.wraps(command)
    def run(*, pull: bool = False, **given: Any) -> None:
        if pull:
            named = given.get("model") or given.get("named")  # where there are two ways, the first one wins
            for model in [*(named if isinstance(named, list | tuple) else [named]), given.get("draft"), *also(given)]:
                fetch_missing(model)
        command(**given)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("pull", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Pull)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def fetch_missing(model: str | None) -> None:
    """Pull what is neither here nor comes by itself."""
    from paceline.hub.default_model import PACKAGED_MODELS
    from paceline.hub.pull import pull
    from paceline.hub.store import here

    if model is not None and model.lower() not in PACKAGED_MODELS and here(model) is None:
        with loading_bars() as progress:
            pull(model, progress=progress)
