"""Draft trees as lists of parents: row i of a group hangs below parents[i], -1 for the root. Plain Python."""

from __future__ import annotations


def ancestry(parents: list[int]) -> list[list[int]]:
    """For each row of a tree the rows on its path, root first, itself last."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([row] if parent < 0 else [*paths[parent], row])
    return paths


def depths(parents: list[int]) -> list[int]:
    """Depth of each row of a tree, 0 for the root: its logical position is the group's start + depth."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found
