"""Heads that draft trees: every line that a round parts into is the chain that was published, and the tree that an
engine grows is EAGLE-2's by the published network, path by path in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_head_target_layer as layers
import torch
from harness import Rows
from head_models import CONFIGS, DraftHand, made, published, target, text
from oracles import oracle
from test_head_networks import BACKENDS, EXACT

from engine.tiny import tiny_llm
from paceline import SamplingParams
from paceline.engine.drafting.lines import Line, lines_layout
from paceline.kernels import cpu
from paceline.models.heads.formats.read import load_head
from paceline.models.heads.further import Further
from paceline.models.heads.interface import Opened
from speculation.model_drafting import Watch

TEXTS = [text(1, 23), text(2, 9)]
LEVELS = [[(0, -1, 11), (0, -1, 12), (1, -1, 13)], [(0, 1, 21), (1, 2, 22), (0, 1, 23), (0, 0, 24)],
          [(0, 2, 31), (0, 0, 32), (1, 1, 33)]]
"""(sequence, line of the level before, token). Lines change places, go on twice, or end."""
FORKING = pytest.mark.parametrize("name", sorted(CONFIGS))


def forked(hand: DraftHand, seqs: list[Any], depth: int,
           further: Further | None = None) -> list[tuple[int, list[int], torch.Tensor]]:
    """Of every line of every level: its sequence, its tokens, and the logits after them."""
    head, size = hand.head, hand.block_size
    hand.layout([Rows(seq, [0] * 16) for seq in seqs])  # which gives them blocks for so many tokens more
    anchors = [tokens[-1] for tokens in TEXTS]
    before = [seq.tables[0][(len(seq.tokens) - 1) // size] * size + (len(seq.tokens) - 1) % size for seq in seqs]
    passes = [hand._pass_layout(seqs, one.first, one.rows, one.mutual) for one in head.passes(depth)]
    opened = Opened(torch.tensor(anchors), torch.tensor(before), passes, depth, further)
    round = head.open(opened, hand.planes, hand.kernels)
    table = np.zeros((len(seqs), max(len(seq.tables[0]) for seq in seqs)), dtype=np.int64)
    for row, seq in zip(table, seqs):
        row[:len(seq.tables[0])] = seq.tables[0]
    seats: Any = [SimpleNamespace(allocation=SimpleNamespace(seat=seat)) for seat in range(len(seqs))]
    lines = [(Line(index, (len(seq.tokens),)), list[int]()) for index, seq in enumerate(seqs)]
    written = [len(seq.tokens) + 1 for seq in seqs]
    logits, _ = round.logits(torch.tensor(anchors))
    found = [(index, [], logits[index]) for index in range(len(seqs))]
    for level in LEVELS[:depth - 1]:
        grown = []
        for member, source, _ in level:
            above, tokens = lines[member if source < 0 else source]
            assert above.member == member
            grown.append((Line(member, (*above.places, written[member])), tokens))
            written[member] += 1
        layout = lines_layout([line for line, _ in grown], seats, table, size, None)
        sources = [member if source < 0 else source for member, source, _ in level]
        round.fork(torch.tensor(sources), layout if len(head.passes(depth)) > 1 else None)
        lines = [(line, [*tokens, token]) for (line, tokens), (_, _, token) in zip(grown, level)]
        logits, _ = round.logits(torch.tensor([token for _, _, token in level]))
        found += [(line.member, tokens, own) for (line, tokens), own in zip(lines, logits)]
    return found


@FORKING
@pytest.mark.parametrize("kernels", list(BACKENDS.values()), ids=list(BACKENDS))
@torch.inference_mode()
def test_every_line_sees_its_own_tokens_alone(name: str, kernels: Any) -> None:
    hand = DraftHand(target(), made(name), kernels)
    seqs = [hand.new() for _ in TEXTS]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, TEXTS)])
    depth = min(len(LEVELS) + 1, CONFIGS[name].depth or 99)
    found = forked(hand, seqs, depth)
    assert len(found) == 2 + sum(map(len, LEVELS[:depth - 1]))
    networks = [published(name, tokens, tapped_by=kernels) for tokens in TEXTS]
    for member, tokens, logits in found:
        torch.testing.assert_close(logits.double(), networks[member].draft(tokens)[0][-1], **EXACT)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
@torch.inference_mode()
def test_lines_of_a_layer_of_the_targets_own_kind(name: str, tmp_path: Path) -> None:
    model: Any = oracle(name).ours
    kernels = BACKENDS["reference"]
    head = load_head(layers.folder(tmp_path / "model", name, layers.stored(name)), model, 128)
    hand = DraftHand(model, head, kernels)
    seqs = [hand.new() for _ in TEXTS]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, TEXTS)])
    for member, tokens, logits in forked(hand, seqs, 3):
        expected = layers.published(name, TEXTS[member], tokens, kernels)[-1]
        torch.testing.assert_close(logits.double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
@torch.inference_mode()
def test_lines_have_the_bits_of_chains_on_native_kernels() -> None:
    from paceline.kernels.cpu.backend import NativeKernels
    kernels, model = NativeKernels(1), target(packed=True)
    hand = DraftHand(model, made("eagle3", packed=True), kernels, torch.float16)
    seqs = [hand.new() for _ in TEXTS]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, TEXTS)])
    for member, tokens, logits in forked(hand, seqs, 4):
        chain, _ = hand.draft([seqs[member]], [TEXTS[member][-1]], [tokens])
        assert torch.equal(chain[0, -1], logits)


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "mtp", "hydra", "medusa", "hydra tied", "medusa tied",
                                  "dspark without confidence or norms of heads"])
def test_an_engine_grows_the_tree_of_the_published_network(name: str) -> None:
    top_k, depth, nodes = 3, 3, 9
    wish = {"method": CONFIGS[name].kind, "tree": True, "top_k": top_k, "k": depth, "nodes": nodes, "adaptive": False}
    llm = tiny_llm(target(), trained={"it": made(name)}, block_size=4, kv_blocks=64, max_model_len=100)
    watch = Watch(llm, wish)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    outs = llm.generate(TEXTS, params, speculation=wish)
    assert all(out.speculation is not None and out.speculation.failure is None for out in outs)
    whole = [(tokens, tree) for tokens, tree in watch.proposals if tree is not None and len(tree) == nodes]
    assert len(whole) >= 4
    for tokens, tree in whole[:6]:
        network = published(name, tokens, tapped_by=BACKENDS["reference"])
        pool: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(depth):
            likeliest = sorted(level, key=lambda path: -level[path])[:top_k]
            grown = {}
            for path in likeliest:
                scores = network.draft(path)[0][-1].log_softmax(-1)
                for score, place in zip(*(part.tolist() for part in scores.topk(top_k))):
                    grown[(*path, int(network.ids[place]))] = level[path] + score
            pool |= grown
            level = grown
        expected = sorted(pool, key=lambda path: -pool[path])[:nodes]
        assert [tuple(tree.path(node)) for node in range(nodes)] == expected
        assert tree.scores is not None and len(tree.scores) == nodes
