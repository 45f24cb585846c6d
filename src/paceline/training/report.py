"""What a run leaves behind beside the head: report.json and, where matplotlib is there, its curves."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from paceline.training.shards import replace_file

log = logging.getLogger("paceline.training")
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")


def write(folder: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=1) + "\n"
    replace_file(folder / "report.json", lambda path: path.write_text(text, encoding="utf-8"))


def draw(path: Path, report: dict[str, Any]) -> bool:
    """Loss, acceptance of each drafted token while learning, tokens a cycle on held-out texts. False: no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        log.warning("curves.png was not drawn: it needs matplotlib (pip install 'paceline[bench]')")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, shares, cycles) = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    learned = report["curve"]
    millions = [entry["tokens"] / 1e6 for entry in learned]
    losses.plot(millions, [entry["loss"] for entry in learned], color=COLOURS[0])
    losses.set_ylabel("loss")
    for place in range(len(learned[-1]["accepted"]) if learned else 0):
        shares.plot(millions, [entry["accepted"][place] for entry in learned], color=COLOURS[place % len(COLOURS)],
                    label=f"token {place + 1}")
    shares.set_ylabel("share accepted while learning (1 - TV)")
    measured = report["measured"]
    for place, depth in enumerate(measured[-1]["tokens_per_cycle"] if measured else ()):
        cycles.plot([entry["tokens"] / 1e6 for entry in measured],
                    [entry["tokens_per_cycle"][depth] for entry in measured], marker=".",
                    color=COLOURS[place % len(COLOURS)], label=f"up to {depth} drafted")
    cycles.set_ylabel("tokens a cycle, greedy, held-out prompts")
    for axes in (losses, shares, cycles):
        axes.set_xlabel("million answer tokens learned from")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{report['kind']} for {report['target']}", fontsize=11)
    replace_file(path, lambda beside: figure.savefig(beside, dpi=130, format="png"))
    pyplot.close(figure)
    return True
