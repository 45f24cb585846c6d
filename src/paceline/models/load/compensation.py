"""How the columns of a matrix make up for one another's rounding errors, measured beforehand for models we know.

Rounded one column after the other, a weight's error can be made up for by the columns of its block that are not yet
rounded, as far as their inputs go together (GPTQ). Blocks of 32 columns, spread as native code has them, give as much
as whole rows: what goes together most is the few features by which the first tokens of a text stand out, and spreading
puts each of those into all columns of its block. `tools/rounding_compensation.py` measures it and writes the files
that are read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Floats: TypeAlias = npt.NDArray[np.float32]
FOLDER = Path(__file__).parent / "compensation"
BLOCK = 32
DAMPING = 0.01
"""Share of the mean that is added to the diagonal: inputs that hardly vary must not be trusted to make up for much."""
SITES = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out", "gate_proj": "gate_up",
         "up_proj": "gate_up", "down_proj": "down"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.weight")
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_UPPER = np.triu_indices(BLOCK, 1)


def site_of(name: str) -> str | None:
    """Whose input a matrix is multiplied with: the same for all that share it. None: of no known kind."""
    if name in _HEADS:
        return "head"
    found = _LAYER.fullmatch(name)
    return f"{found[1]}.{SITES[found[2]]}" if found and found[2] in SITES else None


def compensation(revision: str, name: str) -> Floats | None:
    """[blocks, BLOCK, BLOCK] for the matrix `name` of the checkpoint of this revision: [b, i, j] times the error of
    column i is what is taken from column j > i. None: not measured."""
    site = site_of(name)
    stored = _stored(revision)
    return None if site is None or site not in stored else stored[site].shares()


@dataclass(frozen=True)
class Stored:
    """A site's shares as files have them: in bytes, which is all they need, with a scale a block."""

    codes: npt.NDArray[np.int8]
    scale: Floats

    @staticmethod
    def of(found: Floats) -> Stored:
        values = found[:, _UPPER[0], _UPPER[1]]
        scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float32)
        return Stored(np.round(values / np.where(scale == 0, 1, scale)).astype(np.int8), scale)

    def shares(self) -> Floats:
        found = np.zeros((len(self.codes), BLOCK, BLOCK), dtype=np.float32)
        found[:, _UPPER[0], _UPPER[1]] = self.codes * self.scale
        return found


def shares(gram: torch.Tensor) -> Floats:
    """gram [blocks, BLOCK, BLOCK]: the sum of x^T x over the inputs of each block, spread -> the shares."""
    wide = gram.double()
    mean = wide.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12)
    damped = wide + DAMPING * mean[:, None, None] * torch.eye(BLOCK, dtype=torch.double)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    found: Floats = (upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]).triu(1).float().numpy()
    return found


def write(path: Path, sites: dict[str, Floats]) -> None:
    arrays: dict[str, npt.NDArray[np.int8] | Floats] = {}
    for site, found in sites.items():
        stored = Stored.of(found)
        arrays[site + ".codes"], arrays[site + ".scale"] = stored.codes, stored.scale
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its stub takes no names beside allow_pickle
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Stored]:
    with np.load(path) as arrays:
        return {name.removesuffix(".codes"): Stored(arrays[name], arrays[name.removesuffix("codes") + "scale"])
                for name in arrays.files if name.endswith(".codes")}


def path_for(revision: str) -> Path:
    return FOLDER / (revision.replace(":", "-").replace("/", "-") + ".npz")


@lru_cache(maxsize=1)
def _stored(revision: str) -> dict[str, Stored]:
    path = path_for(revision)
    return read(path) if path.exists() else {}
