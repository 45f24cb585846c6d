"""A rank takes its part of a tensor, and reads no more of the file where that can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_files import random_blocks
from model_files import write_folder, write_gguf

from engine.tiny import BASE, SHAPES, RandomWeights
from paceline.models.config import ModelConfig
from paceline.models.load.gguf_checkpoint import GGUFCheckpoint
from paceline.models.load.safetensors_folder import SafetensorsFolder
from paceline.models.load.weights import Weights
from paceline.models.part import Part
from paceline.models.registry import build
from paceline.models.shard import Shard
from paceline.models.translate import TRANSPOSED, Translated, by_head
from paceline.models.weight_source import take_part
from parallel.test_shares import Rank

PARTS = [Part(0, ((4, 12),)), Part(0, ((0, 4), (12, 16), (20, 24))), Part(1, ((32, 96),)), Part(1, ((3, 17),))]


class Recorder(RandomWeights):
    """Keeps what a model takes, for a file."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        self.taken[name] = super().take(name, shape, dtype).contiguous()
        return self.taken[name]


def model_folder(folder: Path, name: str) -> Path:
    config = BASE | SHAPES[name]
    recorder = Recorder()
    build(ModelConfig.from_dict(config), recorder, 64)
    return write_folder(folder, config, [recorder.taken])


class Counted:
    """A tensor of a file that is read by ranges."""

    def __init__(self, inner: Any, counts: dict[str, int], name: str) -> None:
        self._inner, self._counts, self._name = inner, counts, name

    def __getitem__(self, key: Any) -> torch.Tensor:
        found: torch.Tensor = self._inner[key]
        self._counts[self._name] = self._counts.get(self._name, 0) + found.numel()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "phi3"])
def test_no_rank_reads_what_it_does_not_keep(name: str, exact: bool, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path, name)
    whole_reads: dict[str, int] = {}
    part_reads: dict[str, int] = {}
    stored, slices = SafetensorsFolder.stored, SafetensorsFolder._slice

    def read_whole(self: SafetensorsFolder, tensor: str) -> torch.Tensor:
        found = stored(self, tensor)
        whole_reads[tensor] = whole_reads.get(tensor, 0) + found.numel()
        return found

    monkeypatch.setattr(SafetensorsFolder, "stored", read_whole)
    monkeypatch.setattr(SafetensorsFolder, "_slice",
                        lambda self, tensor: Counted(slices(self, tensor), part_reads, tensor))
    config = ModelConfig.from_dict(BASE | SHAPES[name])
    with SafetensorsFolder(folder) as checkpoint:
        sizes = {tensor: torch.Size(checkpoint.shape(tensor)).numel() for tensor in checkpoint.names()}
        for rank in range(2):
            build(config, Weights(checkpoint, shard=Shard(Rank(rank, 2), exact)), 64)
    assert {tensor: part_reads[tensor] for tensor in part_reads} == {tensor: sizes[tensor] for tensor in part_reads}, \
        "what is split, both ranks read once, together"
    by_both = {tensor for tensor, count in whole_reads.items() if count == 2 * sizes[tensor]}
    small = ("norm", ".gate.", "_a_proj", "e_score_correction_bias")
    assert all(any(part in tensor for part in small) for tensor in by_both), by_both
    assert {tensor for tensor in whole_reads if tensor not in by_both} == {
        tensor for tensor in sizes if ".experts." in tensor}, "an expert is one rank's"
    assert set(part_reads) | set(whole_reads) == set(sizes)


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"])
def test_parts_of_gguf_files(name: str, kind: str, part: Part, tmp_path: Path) -> None:
    """Rows that lie interleaved too, and columns by blocks or, where those would be cut, from the whole."""
    rng = np.random.default_rng(0)
    stored = {"model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
              "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight"}[name]
    data = rng.standard_normal((32, 96)).astype(np.float32) if kind == "F32" else random_blocks(rng, kind, 32, 96)
    embedding = np.ones((8, 32), np.float32), "F32"
    path = write_gguf(tmp_path / "a.gguf", tensors={"token_embd.weight": embedding, stored: (data, kind)})
    with GGUFCheckpoint(path) as checkpoint:
        assert torch.equal(checkpoint.part(name, part), part.of(checkpoint.tensor(name)))


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("layout", [TRANSPOSED, by_head(4)], ids=["transposed", "by head"])
def test_parts_of_other_layouts(layout: Any, part: Part) -> None:
    class Theirs(RandomWeights):
        def has(self, name: str) -> bool:
            return name == "c.weight"

    source = Translated(Theirs(), {"ours": "c"}, {"c.weight": layout})
    whole = source.take("ours.weight", (24, 96))
    assert torch.equal(take_part(source, "ours.weight", (24, 96), part), part.of(whole))
