"""A model is named the same way in every command: as its argument, where it has no other ones, or by `--model`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

from paceline.cli import options
from paceline.errors import ConfigError

_ALSO = typer.Option("--model", "-m", help="The same, as an option.", rich_help_panel="Engine")


def both_ways(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the way to name its model that it lacks. One that has `named` sees to that itself, and where
    arguments are something else the option stays alone."""
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    if "named" in parameters or "model" not in parameters:
        return command
    model = parameters["model"]
    option: Any
    if _is_argument(model):
        option = Annotated[str | None, _ALSO]
    elif not any(map(_is_argument, parameters.values())):
        option = model.annotation
        parameters["model"] = model.replace(annotation=options.ModelArgument)
    else:
        return command

    @functools.wraps(command)
    def run(*, model: str | None = None, named: str | None = None, **given: Any) -> None:
        if model is not None and named is not None:
            raise named_twice(model, named)
        command(model=named if model is None else model, **given)

    last = inspect.Parameter("named", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*parameters.values(), last)]
    run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in own}
    return run


def named_twice(argument: str, option: str) -> ConfigError:
    return ConfigError(f"The model is named twice, {argument!r} and --model {option!r}: leave one out.")


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(about, ArgumentInfo) for about in get_args(parameter.annotation)[1:])
