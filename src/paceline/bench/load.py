"""Loading: how long until a model can generate, and how much memory that takes at its peak, in a fresh process."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.bench.report import Row, document, emit, json_argument, say
from paceline.errors import PacelineError
from paceline.models.load.resolve import resolve

CHILD = """
import json, resource, sys, time
import numpy, tokenizers, torch
import paceline
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before, begin = peak(), time.perf_counter()
llm = paceline.LLM(sys.argv[1])
ready = time.perf_counter() - begin
llm.generate([[1]], paceline.SamplingParams(max_tokens=1))
print(json.dumps([ready, peak() - before]))
"""


def run(model: str | None = None, repeats: int = 5) -> dict[str, Any]:
    """Medians over fresh processes; the file is in the system's cache after the first."""
    path = Path(resolve(model))
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    found: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        say(f"load: {turn} of {repeats}")
        child = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=False)
        if child.returncode:
            raise PacelineError(f"The model could not be loaded: {child.stderr.strip().splitlines()[-1]}")
        if turn:
            seconds, extra = json.loads(child.stdout.splitlines()[-1])
            found.append((seconds, extra))
    seconds = statistics.median(pair[0] for pair in found)
    extra = statistics.median(pair[1] for pair in found)
    return document([
        Row("load", "s", seconds, higher_is_better=False, note="from the warm file cache until it can generate"),
        Row("load_memory", "x", extra / size, higher_is_better=False,
            note=f"peak memory above that of the imports, {extra / 1e6:.0f} MB, over the files' {size / 1e6:.0f} MB"),
    ], model=model or "default", repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.bench.load", description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    json_argument(parser)
    arguments = parser.parse_args()
    emit(run(arguments.model, arguments.repeats), arguments.json)


if __name__ == "__main__":
    main()
