"""What native code does for draft heads: layers in one call, rows of a block, rows that only store, a shared pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import Rows
from head_models import CONFIGS, DraftHand, choices, longest, made, target, text

from paceline.kernels import cpu
from paceline.models.heads.interface import GREEDY, Draw
from paceline.sampling.noise import gumbel, token_bits

native = cpu.load()
pytestmark = pytest.mark.skipif(native is None, reason="the native kernels are not built here (no C++ compiler)")
BLOCKS = ["dspark", "dspark gated", "dspark rnn", "dflash"]


def drafts(name: str, *, whole: bool, threads: int = 1) -> torch.Tensor:
    """whole: with the head's layers in one native call, else kernel by kernel."""
    from paceline.kernels.cpu.backend import NativeKernels
    head: Any = made(name, packed=True)
    assert head.native is not None
    if not whole:
        head.native = None
    hand, texts = DraftHand(target(packed=True), head, NativeKernels(threads)), [text(1, 21), text(2, 6)]
    seqs = [hand.new() for _ in texts]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, texts)])
    return hand.draft(seqs, [tokens[-1] for tokens in texts], choices(seqs, longest(CONFIGS[name])))[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_one_call_for_all_layers_gives_what_kernels_give_one_by_one(name):
    """Up to the order of sums between products, of which what follows is rounded to 8 bits."""
    by_one, whole = drafts(name, whole=False), drafts(name, whole=True)
    assert (by_one - whole).abs().max() < 0.05 * by_one.std()


@pytest.mark.parametrize("threads", [2, 3])
def test_drafts_do_not_depend_on_the_number_of_threads(threads):
    assert torch.equal(drafts("dspark", whole=True, threads=threads), drafts("dspark", whole=True))


def test_several_threads_of_a_program_share_the_pool():
    """Whoever has work waits for who came first; nobody's result is another's."""
    expected = drafts("dspark", whole=True, threads=2)
    found: list[torch.Tensor] = []
    workers = [threading.Thread(target=lambda: found.append(drafts("dspark", whole=True, threads=2))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(found) == 3 and all(torch.equal(one, expected) for one in found)


def test_layers_follow_other_planes_wherever_these_lie():
    """The keys are where the others' were."""
    from paceline.kernels.cpu.backend import NativeKernels
    head: Any = made("dspark", packed=True)
    kernels, config = NativeKernels(1), CONFIGS["dspark"]
    first = {plane.name: torch.zeros(8, *plane.shape) for plane in head.planes(torch.float32, torch.float32)}
    second = {name: plane if name.endswith("keys") else torch.zeros_like(plane) for name, plane in first.items()}
    tapped = [torch.ones(1, config.hidden_size) for _ in config.taps]
    for planes in (first, second):
        head.native.keep(tapped, torch.tensor([3]), torch.tensor([5]), planes, kernels)
    assert all(plane[5].any() for plane in second.values())


@pytest.fixture
def keeping() -> Iterator[tuple[Any, dict[str, Any]]]:
    """A model of one layer with a cache of 8 slots, and the arguments of a right call of Model.keep."""
    assert native is not None
    ones, half = np.ones(64, dtype=np.float32), np.zeros((16, 8), dtype=np.float32)
    model = native.Model(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=64, eps=1e-5, cache="float32",
                         kernels="", threads=1, cos=half, sin=half)
    matrices = [native.Matrix("q8", rows, 64) for rows in (128, 64, 128, 64)]
    nothing = np.zeros(0, dtype=np.float32)
    model.add_layer(ones, ones, *matrices, 0, nothing, nothing, nothing)
    keys, values = torch.zeros(8, 2, 16), torch.zeros(8, 2, 16)  # the model holds none of them
    model.bind_cache([keys], [values], [], [])
    yield model, {"mix": native.Matrix("q8", 64, 128), "matrix": native.Matrix("q8", 64, 64), "norm": ones,
                  "taps": [np.ones((2, 64), dtype=np.float32)] * 2, "positions": np.array([3, 4]),
                  "slots": np.array([1, 7])}
    del keys, values


@pytest.mark.parametrize(("name", "value"), [
    ("norm", np.ones(32, dtype=np.float32)), ("taps", [np.ones((2, 32), dtype=np.float32)] * 2),
    ("taps", [np.ones((2, 64), dtype=np.float32)]), ("taps", [np.ones((1, 64), dtype=np.float32)] * 2),
    ("positions", np.array([3])), ("positions", np.array([3, 16])), ("positions", np.array([-1, 4])),
    ("slots", np.array([1])), ("slots", np.array([1, 8])), ("slots", np.array([-1, 2]))])
def test_wrong_arguments_are_errors(keeping, name, value):
    model, arguments = keeping
    model.keep(**arguments)
    with pytest.raises(ValueError):
        model.keep(**(arguments | {name: value}))


def test_a_matrix_without_every_layers_rows_is_an_error(keeping):
    model, arguments = keeping
    for rows, cols in ((56, 64), (64, 32)):
        with pytest.raises(ValueError):
            model.keep(**(arguments | {"matrix": native.Matrix("q8", rows, cols)}))  # type: ignore[union-attr]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_greedy_tokens_of_a_block_in_one_call(threads):
    """What the logits say slot by slot, whoever is in company; and no further than is likely to be of use."""
    from paceline.kernels.cpu.backend import NativeKernels
    head: Any = made("dspark", packed=True)
    assert head.chains is not None
    hand, texts = DraftHand(target(packed=True), head, NativeKernels(threads)), [text(1, 21), text(2, 6), text(5, 9)]
    seqs = [hand.new() for _ in texts]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, texts)])
    previous, depth = [tokens[-1] for tokens in texts], longest(CONFIGS["dspark"])
    slowly, quickly, shortly = (hand.open(seqs, previous, depth) for _ in range(3))
    found = quickly.chain(previous, [0.0] * 3)
    alive = np.cumprod([best.chances for best in found], axis=0)
    least = float(alive[1].max()) + 1e-6
    assert shortly.chain(previous, [least] * 3) == found[:2 if alive[0].max() >= least else 1]
    assert len(found) == depth
    for best in found:
        logits, confidence = slowly.logits(torch.tensor(previous))
        assert best.tokens == head.target_ids[logits.argmax(-1)].tolist()
        np.testing.assert_allclose(best.chances, confidence.numpy(), atol=1e-5)
        previous = best.tokens
    assert slowly.chain(previous, [0.0] * 3) is None, "it has begun another way"


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_drawn_with_noise_in_one_call(threads):
    """What the target would draw slot by slot from these logits, for each line by its own noise."""
    from paceline.kernels.cpu.backend import NativeKernels
    head: Any = made("dspark", packed=True)
    hand, texts = DraftHand(target(packed=True), head, NativeKernels(threads)), [text(1, 21), text(2, 6), text(5, 9)]
    seqs = [hand.new() for _ in texts]
    hand.step([Rows(seq, tokens[:-1]) for seq, tokens in zip(seqs, texts)])
    previous, depth = [tokens[-1] for tokens in texts], longest(CONFIGS["dspark"])
    draws = [Draw(0.9, 3, 40), GREEDY, Draw(1.7, 2**64 - 1, 99)]
    greedy, quickly, slowly = (hand.open(seqs, previous, depth) for _ in range(3))
    plain, found = greedy.chain(previous, [0.0] * 3), quickly.chain(previous, [0.0] * 3, draws)
    ids = head.target_ids.numpy()
    for slot, best in enumerate(found):
        logits = slowly.logits(torch.tensor(previous))[0].numpy()
        for line, (temperature, seed, position) in enumerate(draws):
            scores = logits[line]
            if temperature:
                scores = scores / np.float32(temperature) + gumbel(token_bits(seed, position + slot, ids))
            assert best.tokens[line] == ids[scores.argmax()]
        previous = best.tokens
    assert [best.tokens[1] for best in found] == [best.tokens[1] for best in plain]
    assert [best.tokens[0] for best in found] != [best.tokens[0] for best in plain]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_draws_are_those_of_the_noise_to_the_bit(temperature, threads):
    """Of any logits, flat ones too, in a vocabulary with gaps; of tokens beside it as well, and however lucky."""
    assert native is not None
    luck = np.random.default_rng(7)
    width, lines, slots = 1501, 3, 40
    first, second = native.Matrix("q8", 6000, 32), native.Matrix("q8", 1504, 32)
    first.take_floats(np.zeros((6000, 32), dtype=np.float32), 0)
    second.take_floats(np.zeros((1504, 32), dtype=np.float32), 0)
    ids = np.sort(luck.choice(5900, width, replace=False))
    chain = native.Markov(first, second, width, ids, np.ones(4, dtype=np.float32), np.zeros(32, dtype=np.float32), 0.0,
                          0.0, threads)
    spread = np.array([0.01, 1.0, 4.0], dtype=np.float32)[:, None, None]
    base = spread * luck.standard_normal((lines, slots, width)).astype(np.float32)
    base[:, ::3, 100:] -= np.float32(6.0 * temperature)
    further = spread * luck.standard_normal((lines, slots, 5)).astype(np.float32)
    further[:, ::5] += base[:, ::5].max(-1, keepdims=True)
    further[:, :, 4] = -np.inf
    further_ids = np.tile(np.arange(5990, 5995), (lines, 1))
    seeds, positions = np.array([0, 2**64 - 1, 77], dtype=np.uint64), np.array([0, 8, 131000])
    tokens, chances = np.empty((lines, slots), dtype=np.int64), np.empty((lines, slots), dtype=np.float32)
    chain.best(base, np.ones((lines, slots, 4), dtype=np.float32), further, further_ids,
               np.zeros(lines, dtype=np.int64), np.full(lines, temperature, dtype=np.float32), seeds, positions,
               np.zeros(lines, dtype=np.float32), tokens, chances)
    beside = 0
    for line, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist())):
        every = np.concatenate((ids, further_ids[line]))
        for slot in range(slots):
            bits, noise = np.empty(len(every), dtype=np.uint32), np.empty(len(every), dtype=np.float32)
            native.token_noise(seed, position + slot, every, bits, noise)
            np.testing.assert_array_equal(bits, token_bits(seed, position + slot, every))
            logits = np.concatenate((base[line, slot], further[line, slot]))
            chosen = int((logits / np.float32(temperature) + noise).argmax())
            assert tokens[line, slot] == every[chosen]
            beside += chosen >= width
    assert 0 < beside < lines * slots / 2


def test_of_equally_likely_tokens_the_first():
    """Whichever thread has looked at it, and beyond the last whole group of tokens."""
    assert native is not None
    first, second = native.Matrix("q8", 24, 32), native.Matrix("q8", 24, 32)
    for matrix in (first, second):
        matrix.take_floats(np.zeros((24, 32), dtype=np.float32), 0)
    sure = {"of_hidden": np.ones(4, dtype=np.float32), "of_token": np.zeros(32, dtype=np.float32), "bias": 0.0,
            "eps": 0.0}
    chain = native.Markov(first, second, 22, np.arange(22) + 2, **sure, threads=3)
    base = np.zeros((2, 3, 22), dtype=np.float32)
    base[0, 1, [5, 13, 21]] = 1.0
    base[1, 1, 21] = 1.0
    tokens, chances = np.empty((2, 3), dtype=np.int64), np.empty((2, 3), dtype=np.float32)
    given = {"base": base, "hidden": np.ones((2, 3, 4), dtype=np.float32), "previous": np.array([0, 1]),
             "temperatures": np.zeros(2, dtype=np.float32), "seeds": np.zeros(2, dtype=np.uint64),
             "positions": np.zeros(2, dtype=np.int64), "least": np.zeros(2, dtype=np.float32),
             "tokens": tokens, "chances": chances,
             "further": np.zeros((2, 3, 0), dtype=np.float32), "further_ids": np.zeros((2, 0), dtype=np.int64)}
    assert chain.best(**given) == 3
    assert tokens.tolist() == [[2, 7, 2], [2, 23, 2]]
    np.testing.assert_allclose(chances, 1.0 / (1.0 + np.exp(-4.0)), rtol=1e-6)
    assert chain.best(**(given | {"least": np.array([1.0, 0.97], dtype=np.float32)})) == 2, "one line goes on alone"
    further = np.array([[0.0, 1.0, 1.5], [-np.inf, 1.25, 1.25]], dtype=np.float32)[:, None].repeat(3, axis=1)
    further[:, 2] = 0.0
    assert chain.best(**(given | {"further": further, "further_ids": np.array([[5, 6, 1], [3, 0, 4]])})) == 3
    assert tokens.tolist() == [[1, 1, 2], [0, 0, 2]], "of the draft vocabulary before all others"
    for wrong in ({"base": base[:, :, :16].copy()}, {"previous": np.array([0])}, {"previous": np.array([0, 24])},
                  {"tokens": np.empty((2, 2), dtype=np.int64)}, {"chances": np.empty((2, 2), dtype=np.float32)},
                  {"temperatures": np.zeros(1, dtype=np.float32)}, {"seeds": np.zeros(3, dtype=np.uint64)},
                  {"temperatures": np.array([0.0, -0.5], dtype=np.float32)}, {"positions": np.array([0, -1])},
                  {"temperatures": np.array([0.0, np.nan], dtype=np.float32)}, {"positions": np.array([0, 2**31])},
                  {"temperatures": np.array([np.inf, 0.0], dtype=np.float32)}, {"positions": np.array([0])},
                  {"hidden": np.ones((2, 3, 5), dtype=np.float32)}, {"least": np.zeros(1, dtype=np.float32)},
                  {"further": np.zeros((2, 3, 1), dtype=np.float32)}, {"further_ids": np.zeros((2, 1), dtype=np.int64)},
                  {"further": np.zeros((2, 2, 1), dtype=np.float32), "further_ids": np.zeros((2, 1), dtype=np.int64)},
                  {"further": np.zeros((2, 3, 1), dtype=np.float32), "further_ids": np.array([[0], [24]])}):
        with pytest.raises(ValueError):
            chain.best(**(given | wrong))
    for ids, width in ((np.arange(22) + 3, 22), (np.arange(21), 22), (np.arange(25), 25)):
        with pytest.raises(ValueError):
            native.Markov(first, second, width, ids, **sure, threads=1)
    for wrong in ({"of_hidden": np.ones(0, dtype=np.float32)}, {"of_token": np.zeros(31, dtype=np.float32)}):
        with pytest.raises(ValueError):
            native.Markov(first, second, 22, np.arange(22), **(sure | wrong), threads=1)


def test_rows_of_trees_are_no_block(keeping):
    model, _ = keeping
    step = {"hidden": np.ones((2, 64), dtype=np.float32), "positions": np.array([0, 1]), "offsets": np.array([0, 2]),
            "starts": np.array([0]), "block_size": 4, "tables": [np.array([[1]])], "slots": [np.array([4, 5])],
            "windows": [0], "first": 0, "last": 1}
    model.run(**step, parents=None, mutual=True)
    with pytest.raises(ValueError, match="trees"):
        model.run(**step, parents=np.array([-1, 0]), mutual=True)
