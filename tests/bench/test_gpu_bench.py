"""bench gpu without a card: what it refuses, and the sizes it reports."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.gpu_shapes import SHAPES, config_of, weight_bytes
from paceline.cli.main import main
from paceline.errors import ConfigError


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b.*smollm2-135m"):
        config_of("llama-9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) != 0
    assert "no CUDA device" in capsys.readouterr().err


def test_every_shape_is_one_the_models_know_and_the_8b_reads_15_gb() -> None:
    for shape in SHAPES:
        assert weight_bytes(config_of(shape), torch.bfloat16) > 0
    assert weight_bytes(config_of("llama-3.1-8b"), torch.bfloat16) / 1e9 == pytest.approx(15.0, abs=0.1)
