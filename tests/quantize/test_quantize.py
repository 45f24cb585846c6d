"""paceline quantize: what is written is what is read back, scales are folded without a trace, mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DictWeights
from model_files import write_folder
from rounded_models import TEXT, expanded, logits, names_of, tiny_folder
from small_tokenizers import EDGES, byte_level, gguf_metadata, write_tokenizer

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.models.chat import ChatTemplate
from paceline.models.config import ModelConfig
from paceline.models.load import Weights, open_checkpoint
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.quantize import run, writer
from paceline.quantize.awq import Folds, output_error, search
from paceline.quantize.calibrate import layer_inputs
from paceline.quantize.gptq import compensated_groups_of_int4
from paceline.quantize.plan import Job, matrices
from paceline.quantize.rounding import groups_of_int4, rows_of_int8, zeroed_groups_of_int4
from paceline.quantize.run import QuantizeReport, quantize
from paceline.quantize.writer import FolderWriter

TOKENS = [5, 9, 200, 31, 7, 7, 120, 64, 3, 18, 250, 90]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def quietly(*report: Any) -> None:
    pass


def rounded(tmp_path: Path, model: Path, to: str, text: Path | None = None, **options: Any) -> QuantizeReport:
    sizes = {"calibration_tokens": 120, "measured_tokens": 60}
    out = tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}"
    return quantize(Job(model=str(model), to=to, out=out, text=text, **sizes | options), quietly)


# -- what is written is what is read back ---------------------------------------------------------------------------

@pytest.mark.parametrize(("to", "options"), [
    ("int8", {}), ("int4", {}), ("awq", {}), ("int8", {"outliers": 2.0})], ids=["int8", "int4", "awq", "outliers"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_round_trip_gives_the_logits_of_the_expanded_weights(tmp_path: Path, text: Path, to: str, family: str,
                                                               options: dict[str, Any]) -> None:
    model = tiny_folder(tmp_path / "m", model_type=family)
    report = rounded(tmp_path, model, to, text, **options)
    assert report.matrices == 14 and report.in_floats == 0
    assert report.group_size == (None if to == "int8" else 32)
    with open_checkpoint(report.out) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(names_of(checkpoint.config))
        loaded = logits(checkpoint.config, Weights(checkpoint), TOKENS)
        assert torch.equal(loaded, logits(checkpoint.config, expanded(report.out), TOKENS))
        with open_checkpoint(model) as original:
            exact = logits(original.config, Weights(original), TOKENS)
        assert not torch.equal(loaded, exact)
        assert (loaded - exact).norm() < (0.05 if to == "int8" else 0.6) * exact.norm()


def test_perplexity_is_measured_before_and_after_on_what_was_not_calibrated_with(tmp_path: Path, text: Path,
                                                                                 monkeypatch: Any) -> None:
    seen: list[list[int]] = []
    inner = run.layer_inputs

    def listening(model: Any, tokens: list[int], device: str) -> Any:
        seen.append(tokens)
        return inner(model, tokens, device)

    monkeypatch.setattr(run, "layer_inputs", listening)
    model = tiny_folder(tmp_path / "m")
    with open_checkpoint(model) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        assert tokenizer is not None
        ids = tokenizer.encode(TEXT, add_special=False)
        report = rounded(tmp_path, model, "awq", text)
        assert seen == [ids[:120]] and report.measured_tokens == 60
        exact = logits(checkpoint.config, Weights(checkpoint), ids[120:180])[:-1]
    surprise = torch.nn.functional.cross_entropy(exact, torch.tensor(ids[121:180]))
    assert report.before == pytest.approx(float(surprise.exp()), rel=1e-4)
    with open_checkpoint(report.out) as checkpoint:
        found = logits(checkpoint.config, Weights(checkpoint), ids[120:180])[:-1]
    after = float(torch.nn.functional.cross_entropy(found, torch.tensor(ids[121:180])).exp())
    assert report.after == pytest.approx(after, rel=1e-4)
    assert report.loss_percent == pytest.approx(100 * (report.after / report.before - 1))
    # Another text to measure on: all of it counts.
    other = tmp_path / "other.txt"
    other.write_text("It rained. " * 6)
    assert rounded(tmp_path, model, "awq", text, measure=other).measured_tokens == len(
        tokenizer.encode("It rained. " * 6, add_special=False))


def test_without_a_text_nothing_is_measured(tmp_path: Path) -> None:
    report = rounded(tmp_path, tiny_folder(tmp_path / "m"), "int8")
    assert report.before is None and report.after is None and report.loss_percent is None


def test_what_the_format_cannot_hold_stays_in_floats(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "m", intermediate_size=80)
    report = rounded(tmp_path, model, "int4")
    assert (report.matrices, report.in_floats) == (12, 2)
    with open_checkpoint(report.out) as after, open_checkpoint(model) as before:
        name = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(after.tensor(name), before.tensor(name))


def test_a_rounded_model_can_be_rounded_again(tmp_path: Path, text: Path) -> None:
    first = rounded(tmp_path, tiny_folder(tmp_path / "m"), "int4", measure=text)
    second = rounded(tmp_path, first.out, "int8", measure=text)
    assert second.before == pytest.approx(first.after)
    assert json.loads((second.out / "config.json").read_text())["quantization_config"]["quant_method"] == \
        "compressed-tensors"


def test_matrices_of_layers_are_rounded_and_routers_embeddings_and_vectors_are_not(tmp_path: Path) -> None:
    layer = "model.layers.3.block_sparse_moe."
    wanted = [f"{layer}experts.0.w1.weight", "model.layers.3.self_attn.q_proj.weight",
              "gpt_neox.layers.0.attention.query_key_value.weight"]
    others = ["model.embed_tokens.weight", "lm_head.weight", f"{layer}gate.weight", "model.layers.3.mlp.router.weight",
              "model.layers.3.mlp.shared_expert_gate.weight"]
    tensors = {name: torch.ones(8, 32) for name in wanted + others}
    tensors["model.layers.3.input_layernorm.weight"] = torch.ones(32)
    with open_checkpoint(write_folder(tmp_path / "a", {}, [tensors])) as checkpoint:
        assert sorted(matrices(checkpoint)) == sorted(wanted)
    with open_checkpoint(write_folder(tmp_path / "b", {}, [{"h.0.attn.c_attn.weight": torch.ones(8, 8)}])) as other, \
            pytest.raises(ConfigError, match="no matrices in layers"):
        matrices(other)


def test_masks_that_a_file_keeps_are_not_written(tmp_path: Path) -> None:
    layer = "gpt_neox.layers.0.attention."
    tensors = {f"{layer}query_key_value.weight": torch.ones(8, 32), f"{layer}query_key_value.bias": torch.ones(8),
               f"{layer}bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), f"{layer}masked_bias": torch.tensor(-1e9)}
    config = {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "intermediate_size": 64, "vocab_size": 8, "max_position_embeddings": 4}
    report = rounded(tmp_path, write_folder(tmp_path / "m", config, [tensors]), "int8")
    with open_checkpoint(report.out) as checkpoint:
        assert sorted(checkpoint.names()) == [f"{layer}query_key_value.bias", f"{layer}query_key_value.weight"]


# -- rounding --------------------------------------------------------------------------------------------------------

def test_rounding_is_within_half_a_step() -> None:
    weight = torch.randn(16, 128) * torch.logspace(-3, 2, 16)[:, None]
    weight[4] = 0.0
    codes = rows_of_int8(weight)
    assert bool(((codes.floats() - weight).abs() <= codes.scales * 0.5001).all())
    asymmetric = zeroed_groups_of_int4(weight, 32)
    steps = asymmetric.scales.float().repeat_interleave(32, 1)
    assert bool(((asymmetric.floats() - weight).abs() <= steps * 1.01).all())  # zero is whole: up to a step at the ends
    plain = zeroed_groups_of_int4(weight.abs() + 1.0, 32)
    assert int(plain.zeros.max()) == 0  # type: ignore[union-attr]


def test_symmetric_groups_are_never_worse_than_reaching_the_largest_weight() -> None:
    weight = torch.randn(8, 128).pow(3)
    groups = weight.reshape(8, 4, 32)
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).half().float()
    plain = (groups / scale).round().clamp(-8, 7) * scale
    found = groups_of_int4(weight, 32).floats().reshape(8, 4, 32)
    assert bool(((found - groups).square().sum(2) <= (plain - groups).square().sum(2) + 1e-9).all())
    assert float((found - groups).square().sum()) < 0.95 * float((plain - groups).square().sum())
    assert torch.equal(groups_of_int4(torch.zeros(8, 32), 32).floats(), torch.zeros(8, 32))


# -- AWQ -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scales_that_are_folded_leave_the_model_as_it_was(tmp_path: Path, family: str) -> None:
    with open_checkpoint(tiny_folder(tmp_path / "m", model_type=family)) as checkpoint:
        config = checkpoint.config
        folds = Folds()
        model = build(ModelConfig.from_dict(config), Weights(checkpoint), 64)
        generator = torch.Generator().manual_seed(1)
        for inputs in layer_inputs(model, TOKENS):
            for site, seen in inputs:
                random = torch.rand(seen.mean.shape, generator=generator) * 3 + 0.3
                if site.head_dim:
                    heads = random.reshape(-1, site.repeats, site.head_dim)
                    random = heads[:, :1].expand_as(heads).reshape(-1)
                folds.add(site, random)
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
        scaled = {name: folds.apply(name, tensor) for name, tensor in tensors.items()}
        changed = [name for name in tensors if not torch.equal(scaled[name], tensors[name])]
        assert len(changed) == 2 * (9 + (family == "qwen2")), "every matrix, both norms, and the bias of the values"
        exact = logits(config, DictWeights(tensors), TOKENS)
        assert torch.allclose(logits(config, DictWeights(scaled), TOKENS), exact, atol=1e-4 * float(exact.abs().max()))


def test_the_search_lowers_the_error_where_some_inputs_are_large(tmp_path: Path, text: Path) -> None:
    model = tiny_folder(tmp_path / "m", loud=True)
    report = rounded(tmp_path, model, "awq", text)
    assert report.output_error is not None
    plain, searched = report.output_error
    assert searched < 0.6 * plain
    with open_checkpoint(model) as checkpoint, open_checkpoint(report.out) as after:
        names = names_of(checkpoint.config)
        tensors = {name: checkpoint.tensor(name) for name in names}
        simply = {name: zeroed_groups_of_int4(tensor, 32).floats() if "_proj.weight" in name else tensor
                  for name, tensor in tensors.items()}
        exact, rough, fine = (logits(checkpoint.config, weights, TOKENS) for weights in (
            DictWeights(tensors), DictWeights(simply), Weights(after)))
    assert (fine - exact).norm() < 0.8 * (rough - exact).norm()


def test_the_error_is_that_of_the_outputs_and_plain_rounding_is_never_beaten_by_the_search(tmp_path: Path) -> None:
    with open_checkpoint(tiny_folder(tmp_path / "m")) as checkpoint:
        model = build(ModelConfig.from_dict(checkpoint.config), Weights(checkpoint), 64)
        for inputs in layer_inputs(model, TOKENS):
            for site, seen in inputs:
                ones = torch.ones_like(seen.mean)
                change = zeroed_groups_of_int4(seen.weight, 32).floats() - seen.weight
                direct = sum(float(torch.dot(row, out)) ** 2 for row in seen.rows for out in change)
                assert output_error(seen, ones, 32) == pytest.approx(direct, rel=1e-3)
                scales, plain, least = search(site, seen, 32)
                assert least <= plain == pytest.approx(direct, rel=1e-3)
                assert output_error(seen, scales, 32) == least


def test_inputs_are_what_the_layers_multiply(tmp_path: Path) -> None:
    with open_checkpoint(tiny_folder(tmp_path / "m")) as checkpoint:
        model = build(ModelConfig.from_dict(checkpoint.config), Weights(checkpoint), 64)
        first = next(layer_inputs(model, TOKENS))
        rows = checkpoint.tensor("model.embed_tokens.weight")[TOKENS]
        normed = rows / (rows.square().mean(1, keepdim=True) + 1e-5).sqrt()
        normed = normed * checkpoint.tensor("model.layers.0.input_layernorm.weight")
        site, seen = first[0]
        assert [name.split(".")[-1] for name in site.consumers] == ["q_proj", "k_proj", "v_proj"]
        assert torch.allclose(seen.rows, normed, atol=1e-5)
        assert torch.allclose(seen.mean, normed.abs().mean(0), atol=1e-5)
        assert torch.allclose(seen.peak, normed.abs().amax(0), atol=1e-5)
        for site, seen in first:
            whole = torch.cat([checkpoint.tensor(f"{name}.weight") for name in site.consumers])
            assert torch.equal(seen.weight, whole) and seen.rows.shape == (len(TOKENS), whole.shape[1])


# -- GPTQ ------------------------------------------------------------------------------------------------------------

def test_errors_are_passed_on_as_the_inverse_of_the_inputs_products_says() -> None:
    """The textbook's way: after each column the inverse is reduced by it, and nothing is done in blocks."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(300, 160, generator=generator) @ torch.randn(160, 160, generator=generator)
    weight = torch.randn(6, 160, generator=generator)
    gram = (x.T @ x).float()
    codes = compensated_groups_of_int4(weight, gram, 32)
    left = weight.double()
    inverse = torch.linalg.inv(gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(160))
    steps = codes.scales.float().repeat_interleave(32, 1).double()
    different = 0
    for column in range(160):
        level = (left[:, column] / steps[:, column]).round().clamp(-8, 7)
        different += int((level + 8 != codes.codes[:, column]).sum())
        error = (left[:, column] - level * steps[:, column]) / inverse[column, column]
        left = left - error[:, None] * inverse[column]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    assert different <= 2, "but for values that lie halfway between two levels"


def test_made_up_errors_are_smaller_and_the_codes_are_written(tmp_path: Path, text: Path) -> None:
    model = tiny_folder(tmp_path / "m")
    report = rounded(tmp_path, model, "int4", text)
    assert report.output_error is not None
    plain, written = report.output_error
    assert written < 0.7 * plain
    with open_checkpoint(model) as checkpoint, open_checkpoint(report.out) as after:
        tensors = {name: checkpoint.tensor(name) for name in names_of(checkpoint.config)}
        simply = {name: groups_of_int4(tensor, 32).floats() if "_proj.weight" in name else tensor
                  for name, tensor in tensors.items()}
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        assert tokenizer is not None
        tokens = tokenizer.encode(TEXT, add_special=False)[:100]
        exact, rough, fine = (logits(checkpoint.config, weights, tokens) for weights in (
            DictWeights(tensors), DictWeights(simply), Weights(after)))
    assert (fine - exact).norm() < 0.8 * (rough - exact).norm()


def test_int4_rounds_plainly_where_it_cannot_calibrate(tmp_path: Path, text: Path) -> None:
    model = tiny_folder(tmp_path / "m")
    assert rounded(tmp_path, model, "int4").output_error is None
    assert rounded(tmp_path, model, "int4", measure=text).output_error is None
    with open_checkpoint(tmp_path / "out-0") as one, open_checkpoint(model) as source:
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(one.tensor(name), groups_of_int4(source.tensor(name), 32).floats())


# -- outliers --------------------------------------------------------------------------------------------------------

def test_columns_of_large_inputs_stay_in_floats(tmp_path: Path, text: Path) -> None:
    model = tiny_folder(tmp_path / "m", loud=True)
    report = rounded(tmp_path, model, "int8", text, outliers=20.0)
    assert report.outlier_columns
    with open_checkpoint(model) as before, open_checkpoint(report.out) as after:
        name = "model.layers.0.self_attn.q_proj.weight"
        found = after.outliers(name)  # type: ignore[attr-defined]
        assert found.columns.tolist() == [3, 17, 40]
        exact, kept = before.tensor(name), after.tensor(name)
        assert torch.equal(kept[:, found.columns], exact[:, found.columns])
        assert not torch.equal(kept, exact)


# -- files -----------------------------------------------------------------------------------------------------------

def test_shards_and_their_index_are_read_again(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(4, 4) for number in range(5)}
    folder = FolderWriter(tmp_path, shard_bytes=150)
    for name, tensor in tensors.items():
        folder.add(name, tensor)
    folder.finish({"model_type": "llama"})
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3 and folder.bytes == 5 * 64
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1, "who may read the config may read the weights"
    with open_checkpoint(tmp_path) as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())


def test_a_ggufs_tokenizer_and_template_are_written_out(tmp_path: Path) -> None:
    metadata = gguf_metadata(byte_level("smollm"), "smollm") | {"tokenizer.chat_template": "{{ messages }}"}
    with open_checkpoint(write_tokenizer(tmp_path / "m.gguf", metadata)) as source:
        folder = tmp_path / "out"
        folder.mkdir()
        writer.write_tokenizer(source, folder)
        ours = Tokenizer.from_checkpoint(source)
        theirs = Tokenizer._from_folder(folder, {})
        assert ours is not None and theirs is not None
        assert ours.fingerprint() == theirs.fingerprint() and ours.eos_ids == theirs.eos_ids
        assert ours.special_tokens == theirs.special_tokens and ours.bos_id == theirs.bos_id
        for edge in EDGES:
            assert ours.encode(edge) == theirs.encode(edge)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    assert ChatTemplate(settings["chat_template"]).source == "{{ messages }}"


# -- the command -----------------------------------------------------------------------------------------------------

def test_the_command_says_what_it_wrote_and_what_it_cost(tmp_path: Path, text: Path, capsys: Any) -> None:
    model = tiny_folder(tmp_path / "m")
    common = ["quantize", str(model), "--text", str(text), "--calibration-tokens", "100", "--measured-tokens", "50"]
    assert main([*common, "--to", "awq", "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert "14 matrices as awq, groups of 32" in said.out and "Perplexity on 50 tokens" in said.out
    assert "calibrating, layer by layer ..." in said.err and "perplexity after ..." in said.err
    assert main([*common, "--to", "int8", "--outliers", "2", "--out", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["to"] == "int8" and told["matrices"] == 14 and told["outlier_columns"] > 0
    assert told["loss_percent"] == pytest.approx(100 * (told["after"] / told["before"] - 1))
    assert main(["quantize", str(model), "--out", str(tmp_path / "c")]) == 0
    assert "No perplexity report" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "out"), [
    (".", "m-int8"), ("./", "m-int8"), ("../m", "m-int8"), ("..", "all-int8"), ("../m/", "m-int8")])
def test_the_folder_is_named_after_the_model_however_it_is_called(tmp_path: Path, monkeypatch: Any, model: str,
                                                                  out: str) -> None:
    jobs: list[Job] = []

    def stop(job: Job, progress: Any) -> None:
        jobs.append(job)
        raise ConfigError("that is all")

    here = tmp_path / "all" / "m"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(run, "quantize", stop)
    assert main(["quantize", model]) == 2
    assert jobs[0].out == Path(out)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--to", "int3"], "int8, int4, awq"), (["--to", "awq"], "--text"), (["--outliers", "6"], "--text"),
    (["--to", "int4", "--outliers", "6", "--text", "TEXT"], "--to int8"),
    (["--outliers", "-1", "--text", "TEXT"], "positive"), (["--group-size", "32"], "one scale per row"),
    (["--to", "int4", "--group-size", "48"], "32, 64, 128"), (["--measured-tokens", "1"], "at least 2"),
    (["--text", "nowhere.txt"], "nowhere.txt"), (["--out", "MODEL"], "is there already"),
    (["--to", "awq", "--text", "EMPTY"], "fewer than two tokens"), (["--device", "abacus"], "abacus")])
def test_mistakes_are_named_and_leave_nothing_behind(tmp_path: Path, text: Path, capsys: Any, arguments: list[str],
                                                     said: str) -> None:
    model = tiny_folder(tmp_path / "m")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    names = {"TEXT": str(text), "EMPTY": str(empty), "MODEL": str(model)}
    arguments = [names.get(word, word) for word in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "o")]
    assert main(["quantize", str(model), *arguments]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_awq_names_architectures_it_does_not_know(tmp_path: Path, text: Path) -> None:
    model = tiny_folder(tmp_path / "m", num_local_experts=4, num_experts_per_tok=2, model_type="mixtral")
    with pytest.raises(ConfigError, match="llama, mistral, qwen2, qwen3, not those of mixtral"):
        rounded(tmp_path, model, "awq", text)


def test_a_run_that_fails_leaves_no_folder_and_one_that_fails_to_measure_leaves_it(tmp_path: Path, text: Path,
                                                                                  monkeypatch: Any) -> None:
    def full(*anything: Any) -> None:
        raise ConfigError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(run, "scorer", full)
        with pytest.raises(ConfigError, match="no room"):
            rounded(tmp_path, tiny_folder(tmp_path / "m"), "int8", text)
        (tmp_path / "out-0").rename(tmp_path / "kept")
        with open_checkpoint(tmp_path / "kept") as checkpoint:
            assert checkpoint.rounded
    monkeypatch.setattr(run, "write_tokenizer", full)
    with pytest.raises(ConfigError, match="no room"):
        rounded(tmp_path, tiny_folder(tmp_path / "m"), "int8")
    assert not list(tmp_path.glob("out-*"))


def test_a_folder_that_was_there_and_empty_stays_there_when_a_run_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*anything: Any) -> None:
        raise ConfigError("no room")

    model, out = tiny_folder(tmp_path / "m"), tmp_path / "own"
    out.mkdir()
    monkeypatch.setattr(run, "write_tokenizer", full)
    with pytest.raises(ConfigError, match="no room"):
        quantize(Job(model=str(model), to="int8", out=out), quietly)
    assert out.is_dir() and not list(out.iterdir())
    monkeypatch.undo()
    quantize(Job(model=str(model), to="int8", out=out), quietly)
    assert (out / "config.json").is_file()
