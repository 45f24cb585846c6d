"""A trained head as it is packaged: int8 matrices, and the name of its target in place of where it lay.

    python tools/package_head.py my-head/head --target smollm2-135m --window 1024 --out src/paceline/heads/MODEL/KIND
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from paceline.llm import LLM
from paceline.models.heads.formats.read import read_head
from paceline.models.heads.formats.write import STORAGE, write_head


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/package_head.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--target", required=True, help="a model's short name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--storage", default="int8", choices=list(STORAGE))
    parser.add_argument("--window", type=int, help="tokens that its layers see; default: as the head says")
    given = parser.parse_args()
    target = LLM(given.target, device="cpu", heads=(), kv_blocks=8, max_model_len=64).engine.model.config
    checkpoint = read_head(given.head, target)
    config = replace(checkpoint.config, target=given.target, window=given.window or checkpoint.config.window)
    write_head(given.out, config, checkpoint.tensors, storage=given.storage, replace=True)
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: {checkpoint.config.kind}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
