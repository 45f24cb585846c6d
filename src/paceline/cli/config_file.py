"""`--config FILE`: the options of a command in TOML, and in the environment. The command line wins over the file, the
file over the environment."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import tomllib
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from paceline.cli.files import read_bytes
from paceline.errors import ConfigError

_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, as a file may say it."""

    key: str
    """Its long name without the dashes before it."""
    parameter: str
    """Of the command's function."""
    kind: type
    many: bool = False
    """It may be given several times: a list."""

    def of_file(self, value: Any, where: str) -> Any:
        if self.key == "speculation" and isinstance(value, dict):
            try:
                return json.dumps(value)
            except TypeError:
                raise ConfigError(f"{where}: {self.key} holds a date or a time, which no option of a drafter is: write "
                                  "numbers, texts, lists and tables.") from None
        if self.many:
            values = value if isinstance(value, list) else [value]
            return [self._single(one, where) for one in values]
        return self._single(value, where)

    def _single(self, value: Any, where: str) -> Any:
        fits = {bool: isinstance(value, bool), int: isinstance(value, int) and not isinstance(value, bool),
                float: isinstance(value, int | float) and not isinstance(value, bool)}
        if not fits.get(self.kind, isinstance(value, str)):
            raise ConfigError(f"{where}: {self.key} must be {self._wanted()}, got {value!r}.")
        return value

    def of_text(self, text: str, where: str) -> Any:
        """Of an environment variable; several are separated by commas."""
        if self.many:
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            return _TRUTHS[text.strip().lower()] if self.kind is bool else self.kind(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{where} must be {self._wanted()}, got {text!r}.") from None

    def _wanted(self) -> str:
        one = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.kind, "a text")
        return f"{one}, or a list of such" if self.many else one


class Settings:
    """Those of a command, found in its signature."""

    def __init__(self, command: Callable[..., None], prefix: str, tables: str | None = None,
                 of_tables: Collection[str] = ()) -> None:
        """`tables`: what the tables of a file are called that say some options for one thing of several each, with the
        parameters that may be there."""
        self._prefix = prefix
        self.tables = tables
        self._of_tables = of_tables
        self._settings = {setting.key: setting for name, parameter in
                          inspect.signature(command, eval_str=True).parameters.items()
                          if (setting := _setting(name, parameter.annotation)) is not None}

    def __iter__(self) -> Any:
        return iter(self._settings.values())

    def variable(self, setting: Setting) -> str:
        return self._prefix + setting.key.replace("-", "_").upper()

    def of_file(self, path: Path) -> dict[str, Any]:
        """Values by the names of the function's parameters."""
        try:
            given = read_bytes(path, _MOST_BYTES)
            if len(given) > _MOST_BYTES:
                raise ConfigError(f"{path} has more than {_MOST_BYTES >> 20} MB, which no configuration has: name "
                                  "another file.")
            content = tomllib.loads(given.decode("utf-8-sig"))
        except OSError as problem:
            raise ConfigError(f"{path} cannot be read ({problem.strerror}): name a file that can.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise ConfigError(f"{path} is not TOML ({problem}): correct the file.") from None
        tables = content.pop(self.tables, None) if self.tables is not None else None
        found = self._read(content, self._settings, str(path))
        if self.tables is not None and tables is not None:
            found[self.tables] = self._read_tables(tables, str(path))
        return found

    def _read(self, content: Mapping[str, Any], known: Mapping[str, Setting], where: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in content.items():
            setting = known.get(key.replace("_", "-"))
            if setting is None:
                raise ConfigError(self._unknown(key, where, known))
            if setting.parameter in found:
                raise ConfigError(f"{where} says {setting.key} twice: remove one.")
            found[setting.parameter] = setting.of_file(value, where)
        return found

    def _read_tables(self, tables: Any, where: str) -> list[dict[str, Any]]:
        """Each has a model, and what differs for it."""
        own = {one.key: one for one in self if one.parameter in self._of_tables} | {
            "model": Setting("model", "model", str), "preload": Setting("preload", "preload", bool)}
        if not isinstance(tables, list) or not all(isinstance(one, dict) and "model" in one for one in tables):
            raise ConfigError(f"{where}: {self.tables} are tables [[{self.tables}]], each with a model: write them so.")
        return [self._read(one, own, f"{where}, [[{self.tables}]] {one['model']!r}") for one in tables]

    def of_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        return {setting.parameter: setting.of_text(environment[name], name) for setting in self
                if environment.get(name := self.variable(setting))}

    def _unknown(self, key: str, where: str, known: Mapping[str, Setting]) -> str:
        if key.replace("_", "-") in self._settings:
            return f"{where} says {key!r}, which is one for the whole server: say it above the tables."
        near = difflib.get_close_matches(key.replace("_", "-"), known, 1)
        hint = f"did you mean {near[0]}?" if near else "its options are those of `paceline serve --help`."
        return f"{where} says {key!r}, which is no option: {hint}"


def _setting(name: str, annotation: Any) -> Setting | None:
    """None: it is no option, or the one that names the file."""
    if get_origin(annotation) is not Annotated:
        return None
    kind, about = get_args(annotation)[:2]
    if name == "config" or not isinstance(about, _OPTION):
        return None
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    many = get_origin(kind) is list
    # In an annotation typer takes the first flag for a default, and puts that right later.
    flags = [flag for flag in (about.default, *(about.param_decls or ())) if isinstance(flag, str)]
    long = next((flag for flag in flags if flag.startswith("--")), f"--{name.replace('_', '-')}")
    return Setting(long.split("/")[0][2:], name, get_args(kind)[0] if many else kind, many)


_OPTION = type(typer.Option())


def config_option(settings: Callable[[], Settings]) -> Any:
    """The option itself: what file and environment say becomes the defaults of all others."""

    def read(context: typer.Context, given: Path | None) -> Path | None:
        known = settings()
        named = os.environ.get(known.variable(Setting("config", "config", Path)))
        path = given or (Path(named) if named else None)
        found = known.of_environment(os.environ)
        if path is not None:
            found |= known.of_file(path)
        if known.tables in found:
            context.meta[known.tables] = found.pop(known.tables)
        context.default_map = {**(context.default_map or {}), **found}
        return path

    return typer.Option("--config", metavar="FILE", is_eager=True, callback=read, rich_help_panel="Server",
                        help="TOML file with options of this command by their names, such as port = 9000. What the "
                             "command line says wins over it, and it over the environment (docs/serving.md).")
