"""Traces and proofs on a card: the text of a trace comes back under every rule, and verify steps have the bits of
decode steps.

Three requests side by side, which do not all fit, are drafted for by a model under one rule and traced; the first is
replayed on an engine that its trace describes, the others on the one that served. Then `paceline verify`'s comparison,
for each type of cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.bench.report import Row, document, json_argument
from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.replay import ReplayReport, replay, replay_on
from paceline.llm import LLM
from paceline.request import SamplingParams
from paceline.watch.step_bits import verify_steps
from subjects import OPENINGS
from verdict import conclude

RULES: dict[str, dict[str, Any]] = {
    "coupled": {"branches": 2}, "rejection": {}, "multi-round": {"branches": [2, 2, 1]},
    "without-replacement": {"branches": [3, 1, 1]}, "typical": {"branches": 2}}
CACHES = ("auto", "fp8")
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, trace=True, ignore_eos=True)


def same(report: ReplayReport) -> bool:
    return report.ran and report.equal and not report.differences


def replayed(family: Path, rule: str, **options: Any) -> Row:
    """How many of three texts come back."""
    llm = LLM(str(family / "target"), block_size=16, kv_blocks=8, max_model_len=64, heads=[],
              preemption="recompute", deterministic=True, **options)
    prompts = [llm.engine.tokenizer.encode(text)[:14] for text in OPENINGS[:3]]
    wish = {"method": "draft", "model": str(family / "draft"), "k": 3, "verify": rule, **RULES[rule]}
    outs = llm.generate(prompts, [replace(SAMPLED, seed=seed) for seed in range(3)],
                        speculation=[wish | {"adaptive": seed > 0} for seed in range(3)])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(outs[0].trace.to_json(), encoding="utf-8")
        found = [replay(path, model=str(family / "target"))]
    found += [replay_on(llm.engine, out.trace) for out in outs[1:]]
    drafted = sum(out.speculation.drafted for out in outs)
    return Row(f"replayed under {rule}, {drafted} drafted", "texts", sum(map(same, found)), {"recorded": len(found)})


def verified(family: Path, cache: str, positions: int, **options: Any) -> Row:
    """Positions whose logits, and whose keys and values, have the same bits in verify steps and in decode steps."""
    engine = build_engine(EngineOptions.of(model=str(family / "target"), heads=(), deterministic=True, kv_dtype=cache,
                                           **options))
    compared = verify_steps(engine, "tiny family", positions, 8).compared
    return Row(f"verify, cache {cache}", "positions", sum(one.equal + one.kv_equal for one in compared),
               {"compared": sum(one.positions + one.kv_positions for one in compared)})


def check(family: Path, *, rules: Sequence[str] = tuple(RULES), caches: Sequence[str] = CACHES, positions: int = 48,
          **options: Any) -> dict[str, Any]:
    rows = [replayed(family, rule, **options) for rule in rules]
    rows += [verified(family, cache, positions, **options) for cache in caches]
    failures = [f"{row.case}: {row.paceline:g} of {expected:g}" for row in rows
                for expected in row.peers.values() if row.paceline != expected]
    return document(rows, family=family.name, **options) | {"failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--family", type=Path, default=Path(__file__).parents[1] / "family")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    json_argument(parser)
    args = parser.parse_args()
    conclude(lambda: check(args.family, device=args.device, dtype=args.dtype), args.json)


if __name__ == "__main__":
    main()
