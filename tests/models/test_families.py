"""What sets a family apart: variants of it against transformers, other spellings of its files, errors that name it."""

from __future__ import annotations

import pytest
import torch
from harness import DictWeights, Hand, Rows
from oracles import oracle, text

from paceline.errors import ModelFormatError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.interface import CausalLM
from paceline.models.registry import build

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
