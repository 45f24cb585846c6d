"""`python -m paceline.training KIND ...`: `paceline train KIND ...` where there are no terminal libraries."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.training.options import HELP, KINDS, TrainOptions, option_names


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m paceline.training", description=__doc__)
    out.add_argument("kind", choices=KINDS)
    for name in option_names():
        field = TrainOptions.__dataclass_fields__[name]
        flag, kind = "--" + name.replace("_", "-"), str(field.type)
        more: dict[str, Any] = {"help": HELP[name].replace("%", "%%")}
        if name == "data":
            more |= {"nargs": "+", "action": "extend", "type": Path, "default": []}
        elif kind.startswith("tuple"):
            more |= {"type": _numbers(float if "float" in kind else int), "default": field.default}
        else:
            more |= {"type": _TYPES[kind.split(" |")[0]], "default": field.default, "required": name == "out"}
        out.add_argument(flag, dest=name, **more)
    return out


_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "Path": Path}


def _numbers(kind: type) -> Any:
    def read(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(",") if part.strip())

    return read


def main(arguments: list[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from paceline.training.interrupts import Interrupted
    from paceline.training.news import News
    from paceline.training.run import train

    def show(news: News) -> None:
        print(f"{100 * news.share:5.1f} % {news.stage}: {news.text}", file=sys.stderr, flush=True)

    try:
        report = train(TrainOptions(**given | {"data": tuple(given["data"])}), show)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    brief = {name: value for name, value in report.items() if name not in ("curve", "measured", "settings")}
    print(json.dumps(brief, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
