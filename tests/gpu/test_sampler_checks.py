"""The comparison of both samplers finds nothing wrong, and would."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import sampler_checks as checks


def test_every_kind_of_request_agrees(device):
    found = checks.check(device, 64, 14, block=64)
    assert found.wrong == [] and found.compared > 90


def test_a_wrong_sibling_is_found(device, monkeypatch):
    several = checks.TritonSampler.several

    def swapped(*given):
        tokens, scores = several(*given)
        return tokens[[0, 2, 1, 3]], scores

    monkeypatch.setattr(checks.TritonSampler, "several", swapped)
    assert {one["what"] for one in checks.check(device, 64, 14, block=64).wrong} == {"siblings", "sibling's logprob"}


def test_a_wrong_token_is_found(device, monkeypatch):
    batch = checks.Batch(2, 64, device, only=checks.requests(64)[0], block=64)
    monkeypatch.setattr(checks, "Batch", lambda *_, **__: batch)
    batch.on_device = torch.flip(batch.on_device, (1,))
    assert {one["what"] for one in checks.check(device, 64, 2).wrong} >= {"token"}
