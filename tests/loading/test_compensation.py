"""What is known of a model's inputs: found by a matrix's name, kept in small files, right where one can work it out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.models.load import compensation as known
from paceline.models.load.compensation import BLOCK, DAMPING, compensation, read, shares, site_of, write


@pytest.mark.parametrize(("name", "site"), [
    ("model.layers.3.self_attn.k_proj.weight", "3.qkv"), ("model.layers.3.self_attn.o_proj.weight", "3.out"),
    ("model.layers.12.mlp.up_proj.weight", "12.gate_up"), ("model.layers.0.mlp.down_proj.weight", "0.down"),
    ("lm_head.weight", "head"), ("model.embed_tokens.weight", "head"),
    ("model.layers.0.mlp.experts.1.w1.weight", None), ("model.norm.weight", None)])
def test_matrices_that_share_an_input_share_a_site(name: str, site: str | None) -> None:
    assert site_of(name) == site


def test_inputs_that_have_nothing_in_common_make_up_for_nothing() -> None:
    assert not shares(torch.eye(BLOCK)[None].repeat(3, 1, 1)).any()


def test_of_two_equal_inputs_the_second_takes_all_of_the_first_s_error() -> None:
    """Too little at column 0 has to come back at column 1: what is taken from it is negative."""
    gram = torch.eye(BLOCK)
    gram[0, 1] = gram[1, 0] = 1.0
    found = shares(gram[None])[0]
    assert found[0, 1] == pytest.approx(-1 / (1 + DAMPING), rel=1e-4)
    assert np.count_nonzero(np.abs(found) > 1e-6) == 1


def test_a_file_keeps_shares_to_a_byte_and_is_found_by_the_model_s_identity(tmp_path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    sites = {name: np.triu(rng.standard_normal((blocks, BLOCK, BLOCK)), 1).astype(np.float32)
             for name, blocks in (("0.qkv", 2), ("head", 3))}
    monkeypatch.setattr(known, "FOLDER", tmp_path)
    known._stored.cache_clear()
    write(known.path_for("sha256:abc"), sites)
    back = read(known.path_for("sha256:abc"))
    for name, wanted in sites.items():
        assert np.abs(back[name].shares() - wanted).max() <= np.abs(wanted).max() / 254 * 1.001
    assert np.array_equal(compensation("sha256:abc", "model.layers.0.self_attn.v_proj.weight"),
                          back["0.qkv"].shares())
    assert compensation("sha256:abc", "model.layers.1.self_attn.v_proj.weight") is None
    assert [path.name for path in tmp_path.iterdir()] == ["sha256-abc.npz"]
    known._stored.cache_clear()
    assert compensation("sha256:other", "lm_head.weight") is None
    known._stored.cache_clear()
