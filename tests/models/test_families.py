"""What sets a family apart: variants of it against transformers, other spellings of its files, errors that name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from harness import DictWeights, Hand, Rows
from oracles import oracle, text

from paceline import LLM, SamplingParams
from paceline.errors import ModelFormatError
from paceline.kernels import cpu, select
from paceline.kernels.cpu import NativeKernels
from paceline.models.config import ModelConfig
from paceline.models.interface import CausalLM
from paceline.models.packing import PackingWeights
from paceline.models.registry import build, read_config

REFERENCE = select(True, torch.device("cpu"))
EAGER = select(False, torch.device("cpu"))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gpt_neox-sequential", "phi3-window", "qwen3_moe-plain"])
def test_variants_agree_with_transformers(name):
    tokens = text(60)
    close(Hand(oracle(name).ours, EAGER).run(tokens, 23), oracle(name).logits(tokens))


@pytest.mark.parametrize(("length", "tokens"), [(128, 100), (256, 150)])
def test_longrope_divides_by_the_short_or_the_long_list(length, tokens):
    """The model was first made for 128 positions. transformers looks at the text's length, the engine at its own."""
    case = oracle("phi3-long", max_model_len=length)
    close(Hand(case.ours, EAGER).run(text(tokens), 40), case.logits(text(tokens)))


def test_longrope_does_not_depend_on_the_length_of_a_request():
    hand = Hand(oracle("phi3-long", max_model_len=256).ours, REFERENCE)
    assert torch.equal(hand.run(text(20)), hand.run(text(150))[:20])


def test_an_incomplete_longrope_is_named():
    raw = dict(oracle("phi3-long").raw)
    raw["rope_parameters"] = {**raw["rope_parameters"], "long_factor": [1.0]}
    raw["rope_scaling"] = None
    with pytest.raises(ModelFormatError, match="long_factor"):
        build(ModelConfig.from_dict(raw), DictWeights(dict(oracle("phi3-long").theirs.state_dict())), 256)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_neox", "olmo2"])
def test_taps_equal_the_hidden_states_of_transformers(name):
    case, tokens = oracle(name), text(25)
    hand = Hand(case.ours, EAGER)
    context = hand.forward([Rows(hand.new(), tokens)], frozenset({0, 1, 2}))
    case.ours.forward(torch.tensor(tokens), context)
    with torch.inference_mode():
        theirs = case.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for layer in (0, 1, 2):
        close(context.tapped[layer], theirs[layer][0])


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_layers_in_two_parts_equal_the_whole_run(name, cut):
    """Learned positions are added once, whichever part comes first."""
    model, tokens = oracle(name).ours, text(30)

    def context():
        hand = Hand(model, REFERENCE)
        return hand.forward([Rows(hand.new(), tokens)])

    ids = torch.tensor(tokens)
    whole, parts = model.forward(ids, context()), context()
    assert torch.equal(model.layers(model.layers(model.embed(ids), parts, 0, cut), parts, cut), whole)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_a_layer_without_its_sublayers_passes_the_stream_on(name):
    model, tokens = oracle(name).ours, text(12)
    hand = Hand(model, REFERENCE)
    context = hand.forward([Rows(hand.new(), tokens)])
    context.skip = frozenset((layer, part) for layer in range(3) for part in ("attn", "mlp"))
    hidden = model.embed(torch.tensor(tokens))
    assert torch.equal(model.layers(hidden.clone(), context), hidden)
    context.skip = frozenset({(1, "attn")})
    assert not torch.equal(model.layers(hidden.clone(), context), hidden)


def rebuilt(name: str, rename: dict[str, str]) -> CausalLM:
    """The same model from tensors of other names."""
    tensors = {}
    for key, tensor in oracle(name).theirs.state_dict().items():
        for old, new in rename.items():
            if key.startswith(old):
                key = new + key.removeprefix(old)
                break
        tensors[key] = tensor
    return build(ModelConfig.from_dict(oracle(name).raw), DictWeights(tensors), 256)


@pytest.mark.parametrize(("name", "rename"), [
    ("gpt2", {"transformer.": ""}), ("gemma3", {"model.": "language_model.model."}),
    ("gemma3", {"model.": "model.language_model."})],
    ids=["GPT-2 as published", "Gemma 3 with a vision model", "the same, newer"])
def test_checkpoints_may_call_their_tensors_otherwise(name, rename):
    ours, usual = (Hand(model, REFERENCE).run(text(20)) for model in (rebuilt(name, rename), oracle(name).ours))
    assert torch.equal(ours, usual)


def test_a_missing_tensor_has_the_name_it_has_in_the_file():
    with pytest.raises(KeyError, match=r"gpt_neox\.layers\.0\.attention\.query_key_value\.weight"):
        rebuilt("gpt_neox", {"gpt_neox.layers.0.attention.query_key_value": "elsewhere"})


def test_a_model_of_learned_positions_has_no_others():
    case = oracle("gpt2")
    with pytest.raises(ModelFormatError, match=r"learned 256 positions.*max_model_len.*300"):
        build(ModelConfig.from_dict(case.raw), DictWeights(dict(case.theirs.state_dict())), 300)


def test_mixtures_without_experts_are_named():
    raw = {key: value for key, value in oracle("qwen3_moe").raw.items() if key != "num_experts"}
    with pytest.raises(ModelFormatError, match="num_experts"):
        build(ModelConfig.from_dict(raw | {"num_local_experts": None}),
              DictWeights(dict(oracle("qwen3_moe").theirs.state_dict())), 64)


@pytest.mark.parametrize("raw", [{"model_type": "bloom", "n_layer": 2}, {"model_type": "opt", "hidden_act": "relu"}])
def test_an_unknown_architecture_is_named_before_its_config_is_read(raw):
    with pytest.raises(ModelFormatError, match=rf"'{raw['model_type']}'.*gemma2, gemma3, gemma3_text, gpt2, gpt_neox"):
        read_config(raw)
    assert read_config(oracle("gpt2").raw).hidden_size == 48


def saved(name: str, folder: Path) -> Any:
    """The oracle's model, in a folder. Its end is transformers' default, which may lie beyond so small a vocabulary."""
    theirs = oracle(name).theirs
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = 2
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_folder_answers_as_transformers_does(name, tmp_path: Path):
    theirs, prompt = saved(name, tmp_path), text(30)
    said = LLM(str(tmp_path), kv_blocks=40).generate([prompt], SamplingParams(max_tokens=12, temperature=0.0,
                                                                              ignore_eos=True))[0]
    with torch.inference_mode():
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert said.error is None and said.outputs[0].token_ids == tokens[30:]


@pytest.mark.parametrize(("name", "window", "groups"), [
    ("phi3-window", 14, ["full"]), ("gemma2", 12, ["full"]), ("gemma3", 12, ["full", "window-12"])])
def test_a_window_that_hides_nothing_is_none(name, window, groups, tmp_path: Path):
    """In an engine for texts as long as the window; Gemma 3's layers with one have a rotation of their own as well. The
    engine for longer texts has the windows, and the same bits for short ones."""
    saved(name, tmp_path)
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    short, long = (LLM(str(tmp_path), kv_blocks=8, max_model_len=length, deterministic=True)
                   for length in (window, window + 1))
    assert [group.name for group in short.engine.model.cache_groups] == groups
    assert any(group.window == window for group in long.engine.model.cache_groups)
    few, many = (llm.generate([text(window - 1)], score)[0].prompt_logprobs[1:] for llm in (short, long))
    assert [entry.raw for entry in few] == [entry.raw for entry in many]


@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here (no C++ compiler)")
@pytest.mark.parametrize("config", [
    transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    transformers.GPTNeoXConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                               num_attention_heads=4, max_position_embeddings=64)], ids=["gpt2", "gpt_neox"])
def test_rearranged_tensors_are_packed_as_well(config):
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = PackingWeights(DictWeights(dict(theirs.state_dict())))
    ours = build(ModelConfig.from_dict(config.to_dict()), weights, 64)
    assert ours.bits == 8
    got = Hand(ours, NativeKernels()).run(text(20), 7)
    with torch.inference_mode():
        want = theirs(torch.tensor([text(20)]), use_cache=False).logits[0]
    torch.testing.assert_close(got, want, atol=0.02 * float(want.abs().max()), rtol=0)
