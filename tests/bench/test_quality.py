"""bench quality: perplexity is what it says, and the rounded formats are what they claim."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch

from engine.tiny import BASE, SHAPES, VOCAB, RandomWeights, tiny_model
from paceline.bench import quality
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.kernels.eager import EagerKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.measure.perplexity import Format, Scorer, perplexity, windows
from paceline.measure.rounding import RoundedKernels, RoundedWeights, round_int4, round_int8
from paceline.measure.text_files import read_text


def tokens_of(count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def test_perplexity_of_windows_equals_a_direct_computation():
    """transformers' own model, the same weights, each window by itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in (BASE | SHAPES["llama"]).items() if key != "model_type"}
    oracle = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    source = RandomWeights()
    oracle.load_state_dict({name: source.take(name, tuple(old.shape)) for name, old in oracle.state_dict().items()
                            if name != "lm_head.weight"}, strict=False)
    oracle.tie_weights()
    tokens = tokens_of(75)
    surprise, count = 0.0, 0
    for begin in (0, 30, 60):
        part = torch.tensor(tokens[begin:begin + 30])
        with torch.inference_mode():
            logits = oracle(part[None]).logits[0, :-1]
        surprise += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
        count += len(part) - 1
    model = tiny_model()
    assert perplexity(Scorer(model, EagerKernels(), 30), tokens, 30) == pytest.approx(math.exp(surprise / count), 1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_the_chunk_does_not_matter(chunk):
    scorer = Scorer(tiny_model(), ReferenceKernels(), 40)
    tokens = tokens_of(40)
    assert scorer.surprise(tokens, chunk) == pytest.approx(scorer.surprise(tokens), 1e-9)


def test_a_window_knows_nothing_of_the_one_before():
    scorer = Scorer(tiny_model(), EagerKernels(), 20)
    first, second = tokens_of(40)[:20], tokens_of(40)[20:]
    alone = scorer.surprise(second)
    scorer.surprise(first)
    assert scorer.surprise(second) == alone


def test_windows_cover_all_tokens_but_a_single_last_one():
    assert [len(part) for part in windows(list(range(10)), 4)] == [4, 4, 2]
    assert [len(part) for part in windows(list(range(9)), 4)] == [4, 4]


@pytest.mark.parametrize(("size", "groups"), [(32, 3), (64, 2), (None, 1), (128, 1)])
def test_int8_has_255_levels_for_every_group(size, groups):
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(1))
    rounded = round_int8(x, size)
    parts, rounded_parts = x.split(size or 80, 1), rounded.split(size or 80, 1)
    assert len(parts) == groups
    for part, own in zip(parts, rounded_parts):
        peak = part.abs().amax(1, keepdim=True)
        levels = own / (peak / 127)
        assert torch.allclose(levels, levels.round(), atol=1e-3) and float(levels.abs().max()) <= 127.001
        assert bool(((own - part).abs() <= peak / 127 * 0.5001).all()), "off by at most half a level"
        assert torch.allclose(own.abs().amax(1, keepdim=True), peak)
    assert torch.equal(round_int8(torch.zeros(2, 40), 32), torch.zeros(2, 40))


def test_smaller_groups_keep_an_outlier_to_themselves():
    x = torch.ones(1, 64)
    x[0, 0] = 1000.0
    assert round_int8(x)[0, 63] == 0.0
    assert round_int8(x, 32)[0, 63] == pytest.approx(1.0)


def test_int4_is_what_gguf_calls_q4_0():
    gguf = pytest.importorskip("gguf")
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(2))
    packed = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q4_0)
    theirs = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0))
    different = ~torch.isclose(round_int4(x), theirs, atol=1e-6)
    assert float(different.float().mean()) < 0.02, "but for values halfway between two levels"
    assert torch.equal(round_int4(torch.zeros(1, 32)), torch.zeros(1, 32))


def test_weights_are_rounded_and_vectors_are_not():
    source = RandomWeights()
    plain = source.take("w", (8, 64))
    assert torch.equal(RoundedWeights(source, "file").take("w", (8, 64)), plain)
    assert torch.equal(RoundedWeights(source, "int8_channel").take("w", (8, 64)), round_int8(plain))
    assert torch.equal(RoundedWeights(source, "int8_block").take("w", (8, 64)), round_int8(plain, 32))
    assert torch.equal(RoundedWeights(source, "int4_block").take("w", (8, 64)), round_int4(plain))
    assert torch.equal(RoundedWeights(source, "int4_block").take("b", (8,)), source.take("b", (8,)))
    assert not hasattr(RoundedWeights(source), "blocks")
    with pytest.raises(ValueError, match="int8_channel"):
        RoundedWeights(source, "int3")


def test_activations_are_rounded_except_where_they_stay_in_float():
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    exact = EagerKernels().linear(x, weight)
    assert torch.equal(RoundedKernels(None).linear(x, weight), exact)
    assert torch.equal(RoundedKernels(32).linear(x, weight), EagerKernels().linear(round_int8(x, 32), weight))
    assert torch.equal(RoundedKernels(0).linear(x, weight), EagerKernels().linear(round_int8(x), weight))
    assert torch.equal(RoundedKernels(32, frozenset({64})).linear(x, weight), exact)


def test_the_cache_is_rounded_for_each_token_and_head():
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    keys, values = torch.zeros(5, 2, 16), torch.zeros(5, 2, 16)
    RoundedKernels(None, int8_cache=True).store(keys, values, torch.tensor([4, 1, 2]), k, v)
    assert torch.equal(keys[[4, 1, 2]], round_int8(k.reshape(6, 16)).view(3, 2, 16))
    assert torch.equal(values[[4, 1, 2]], round_int8(v.reshape(6, 16)).view(3, 2, 16))


def test_every_format_has_a_name_of_its_own_and_float32_comes_first():
    names = [format.name for format in (*quality.ENGINES, *quality.GATE)]
    assert len(set(names)) == len(names)
    assert quality.ENGINES[0] == Format("float32")


def test_a_text_may_be_plain_or_packed(tmp_path):
    (tmp_path / "a.txt").write_text("Zwölf Boxkämpfer")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("Zwölf Boxkämpfer".encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.txt.gz") == "Zwölf Boxkämpfer"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"not gzip",
                                     gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 20])
def test_a_text_that_cannot_be_read_is_named(content, tmp_path, capsys):
    path = tmp_path / ("a.txt" if content in (None, b"\xff\xfe\x00") else "a.gz")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(path)
    assert main(["bench", "quality", "--text", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_losses_are_against_float32_on_the_same_tokens(tmp_path, monkeypatch):
    """A small model in a folder: engines on all tokens, rounded formats on the first windows."""
    folder = tiny_folder(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 3)
    monkeypatch.setattr(quality, "ENGINES", quality.ENGINES[:1])
    monkeypatch.setattr(quality, "GATE", (Format("int8", weights="int8_channel", activations=0),))
    result = json.loads(json.dumps(quality.run(tmp_path / "text.txt", str(folder), tokens=100, window=16,
                                               gate_windows=2)))
    assert result["settings"]["tokens"] == 100
    assert [row["case"] for row in result["rows"]] == ["float32", "float32", "int8"]
    whole, some, rounded = result["rows"]
    assert whole["paceline"] != some["paceline"]
    assert whole["loss_percent"] == some["loss_percent"] == 0.0
    assert rounded["loss_percent"] == pytest.approx(100 * (rounded["paceline"] / some["paceline"] - 1))
    assert rounded["note"].endswith("on 32 tokens")
    assert (whole["top1_percent"], whole["kl"]) == (some["top1_percent"], some["kl"]) == (100.0, 0.0)
    assert 0 < rounded["kl"] < 0.1 and f"KL {rounded['kl']:.4f}" in rounded["note"]


def test_the_command_runs_torch_formats_on_the_device_that_was_asked_for(tmp_path, monkeypatch, capsys):
    folder = tiny_folder(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox")
    monkeypatch.setattr(quality, "ENGINES", quality.ENGINES[:1])
    monkeypatch.setattr(quality, "GATE", ())
    monkeypatch.setattr("paceline.engine.build.torch.cuda.is_available", lambda: False)
    scorer, devices = quality.scorer, []

    def watched(*arguments):
        devices.append(arguments[-1])
        return scorer(*arguments)

    monkeypatch.setattr(quality, "scorer", watched)
    arguments = ["bench", "quality", "--text", str(tmp_path / "text.txt"), "--model", str(folder), "--json", "-"]
    assert main([*arguments, "--device", "auto"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["device"] == "cpu"
    assert set(devices) == {"cpu"}
    for device in ("cuda", "warp"):
        assert main([*arguments, "--device", device]) == 2
        assert device in capsys.readouterr().err


def tiny_folder(tmp_path):
    from safetensors.torch import save_file

    from paceline.bench.null_model import byte_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    settings = BASE | SHAPES["llama"] | {"vocab_size": 256, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    hidden, wide, kv = 32, 48, 16
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (256, hidden), "model.norm.weight": (hidden,),
              layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
              layer + "self_attn.q_proj.weight": (hidden, hidden), layer + "self_attn.k_proj.weight": (kv, hidden),
              layer + "self_attn.v_proj.weight": (kv, hidden), layer + "self_attn.o_proj.weight": (hidden, hidden),
              layer + "mlp.gate_proj.weight": (wide, hidden), layer + "mlp.up_proj.weight": (wide, hidden),
              layer + "mlp.down_proj.weight": (hidden, wide)}
    source = RandomWeights()
    save_file({name: source.take(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder
