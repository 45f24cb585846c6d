"""The tables of `bench acceptance`, in markdown: a pair for each context and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OVERALL = "overall"


def markdown(result: dict[str, Any]) -> str:
    found, asked = result["machine"], result["settings"]
    parts = [f"{asked['model']} ({asked['kernels']}), {asked['questions']} questions of up to {asked['max_tokens']} "
             f"new tokens; {found.get('gpu', found['cpu'])}"]
    sections = dict.fromkeys((row["context"], row["temperature"]) for row in result["rows"])
    for context, temperature in sections:
        rows = [row for row in result["rows"] if (row["context"], row["temperature"]) == (context, temperature)]
        title = "greedy" if temperature == 0.0 else f"temperature {temperature:g}"
        where = f", prompts of {context} tokens" if context else ""
        parts += [f"Mean accepted tokens, the bonus counted, {title}{where}:", _accepted(rows),
                  f"Accepted at a position where all before it were, {title}{where}:", _positions(rows)]
    if result["differences"]:
        parts.append(f"{result['differences']} texts differ from those of the first draft at their temperature.")
    parts += [f"{name} was left out: {reason}" for name, reason in asked["left_out"].items()]
    return "\n\n".join(parts)


def _accepted(rows: Sequence[dict[str, Any]]) -> str:
    categories = [name for name in dict.fromkeys(row["category"] for row in rows) if name != OVERALL]
    lines = [["draft", "verified", "drafted", OVERALL, *categories, "drafts"]]
    for total in _totals(rows):
        own = {row["category"]: row for row in rows if _who(row) == _who(total)}
        means = [f"{own[name]['mean_accepted_tokens']:.2f}" for name in (OVERALL, *categories)]
        lines.append([_draft(total), total["verify"], f"{total['drafted'] / max(1, total['drafts']):.1f}", *means,
                      f"{total['drafts']}"])
    return _lines(lines)


def _positions(rows: Sequence[dict[str, Any]]) -> str:
    totals = _totals(rows)
    deepest = max(len(total["conditional_acceptance"]) for total in totals)
    lines = [["draft", "verified", *(str(depth + 1) for depth in range(deepest))]]
    for total in totals:
        shares = [f"{share:.3f}" if reached else "-"
                  for share, reached in zip(total["conditional_acceptance"], total["reached"])]
        lines.append([_draft(total), total["verify"], *shares, *["-"] * (deepest - len(shares))])
    return _lines(lines)


def _totals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["category"] == OVERALL]


def _who(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["method"], row["draft"], row["verify"]


def _draft(row: dict[str, Any]) -> str:
    return f"{row['method']} {row['draft']}".rstrip()


def _lines(cells: Sequence[Sequence[str]]) -> str:
    texts = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
    return "\n".join([texts[0], "| " + " | ".join(["---"] * len(cells[0])) + " |", *texts[1:]])
