"""Row-wise ops: both backends compute the same thing; the reference's bits do not depend on company or threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import select
from paceline.kernels.reference.ordered import ACTIVATIONS, exp, ordered_sum, silu
from paceline.kernels.reference.products import BATCH, bmm_by_batches

CPU = torch.device("cpu")
REFERENCE, EAGER = select(True, CPU), select(False, CPU)
BOTH = pytest.mark.parametrize("kernels", [REFERENCE, EAGER], ids=["reference", "eager"])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_select_names_what_it_gives():
    assert (REFERENCE.name, REFERENCE.deterministic) == ("reference", True)
    assert (EAGER.name, EAGER.deterministic) == ("eager", False)


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9, 17, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(kernels, rows, bias):
    x, weight = torch.randn(rows, 72), torch.randn(40, 72)
    offset = torch.randn(40) if bias else None
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(kernels.linear(x, weight, offset).double(), expected, atol=1e-4, rtol=0)


@BOTH
@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16), (2, 16), (5, 3, 16)])
def test_rms_norm(kernels, shape):
    x, weight = torch.randn(shape), torch.randn(16)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=0)


@BOTH
def test_a_weight_wider_than_what_it_norms(kernels):
    """Rounded once, after the weight, as Gemma does."""
    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), 1 + torch.randn(64) / 100
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), expected.to(torch.bfloat16))


@BOTH
@pytest.mark.parametrize("shape", [(1, 16), (2, 16), (5, 3, 17)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(kernels, shape, bias):
    x, weight = torch.randn(shape) + 3, torch.randn(shape[-1])
    offset = torch.randn(shape[-1]) if bias else None
    expected = F.layer_norm(x.double(), (shape[-1],), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(kernels.layer_norm(x, weight, offset, 1e-5).double(), expected, atol=1e-5, rtol=0)


@BOTH
@pytest.mark.parametrize(("activation", "expected"), [
    ("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))])
def test_activations(kernels, activation, expected):
    x = torch.cat((torch.randn(4, 30) * 4, torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4] * 6])))
    torch.testing.assert_close(kernels.activate(x, activation).double(), expected(x.double()), atol=1e-5, rtol=1e-5)
    gate_up = torch.randn(5, 30) * 4
    gate, up = gate_up.double().chunk(2, -1)
    got = kernels.gated(gate_up, None, torch.eye(30), None, activation)
    torch.testing.assert_close(got.double(), expected(gate) * up, atol=1e-5, rtol=1e-5)


@BOTH
def test_softcap(kernels):
    x = torch.randn(3, 40) * 100
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(kernels.softcap(x, 30.0).double(), expected, atol=1e-5, rtol=0)


@BOTH
def test_silu_mul(kernels):
    gate_up = torch.randn(5, 30) * 20
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(kernels.silu_mul(gate_up).double(), F.silu(gate) * up, atol=1e-4, rtol=1e-5)


@BOTH
def test_silu_mul_of_huge_values_stays_finite(kernels):
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(kernels.silu_mul(gate_up).abs(), torch.tensor([[0.0, 0.0, 200.0, 1e4]]))


@BOTH
def test_rotate_turns_pairs_of_halves(kernels):
    x = torch.randn(4, 3, 8)
    angles = torch.rand(4, 4) * 6
    c, s = angles.cos(), angles.sin()
    turned = kernels.rotate(x, torch.cat((c, c), -1)[:, None], torch.cat((-s, s), -1)[:, None])
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), -1), atol=1e-5, rtol=0)


@BOTH
def test_store_writes_its_slots_and_no_other(kernels):
    keys, values = torch.zeros(10, 2, 4), torch.zeros(10, 2, 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    slots = torch.tensor([7, 2, 5])
    kernels.store(keys, values, slots, k, v)
    assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
    others = [0, 1, 3, 4, 6, 8, 9]
    assert not keys[others].any() and not values[others].any()


@BOTH
def test_route_picks_the_heaviest_and_gives_ties_to_the_lowest_expert(kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 4.0, 4.0]])
    weights, experts = kernels.route(logits, 2, renormalise=True)
    assert experts.tolist() == [[1, 2], [0, 1], [0, 2]]
    expected = torch.softmax(logits.gather(1, experts), -1)
    torch.testing.assert_close(weights, expected)
    weights, _ = kernels.route(logits, 2, renormalise=False)
    torch.testing.assert_close(weights, torch.softmax(logits, -1).gather(1, experts))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ops_keep_the_dtype_they_are_given(kernels, dtype):
    x = torch.randn(2, 16, dtype=dtype)
    angle = torch.ones(2, 1, 8)
    assert kernels.linear(x, torch.randn(4, 16, dtype=dtype)).dtype == dtype
    assert kernels.rms_norm(x, torch.ones(16, dtype=dtype), 1e-5).dtype == dtype
    assert kernels.silu_mul(x).dtype == dtype
    assert kernels.activate(x, "gelu").dtype == kernels.softcap(x, 5.0).dtype == dtype
    assert kernels.rms_norm(x, torch.ones(16), 1e-5).dtype == dtype
    assert kernels.layer_norm(x, torch.ones(16, dtype=dtype), torch.ones(16, dtype=dtype), 1e-5).dtype == dtype
    assert kernels.rotate(x.view(2, 2, 8), angle, angle).dtype == dtype


@pytest.mark.parametrize("size", [1, 2, 3, 64, 576, 577])
def test_ordered_sum_is_a_sum(size):
    x = torch.randn(3, size)
    torch.testing.assert_close(ordered_sum(x).double(), x.double().sum(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [3, 64, 576, 1536])
def test_ordered_sum_of_a_row_does_not_see_its_neighbours(size, threads):
    x = torch.randn(300, size)
    whole = ordered_sum(x)
    for first, last in ((0, 1), (7, 9), (3, 300)):
        assert torch.equal(ordered_sum(x[first:last].clone()), whole[first:last])
    assert torch.equal(ordered_sum(x.t().contiguous().t()), whole)


def test_functions_of_an_element_do_not_see_its_place(threads):
    x = torch.randn(100_000) * 10
    for function in (exp, silu, *ACTIVATIONS.values(), lambda x: REFERENCE.softcap(x, 7.0)):
        whole = function(x)
        for first, last in ((0, 1), (5, 8), (1, 1030), (3, 99_999)):
            assert torch.equal(function(x[first:last]), whole[first:last])
        assert torch.equal(function(x[::7]), whole[::7])


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 96), (576, 960), (1536, 576), (72, 1001)])
def test_reference_linear_of_a_row_does_not_see_its_neighbours(inputs, outputs, threads):
    x, weight = torch.randn(67, inputs), torch.randn(outputs, inputs)
    torch.set_num_threads(1)
    alone = torch.cat([REFERENCE.linear(x[row:row + 1], weight) for row in range(0, 67, 6)])
    torch.set_num_threads(threads)
    assert torch.equal(REFERENCE.linear(x, weight)[::6], alone)
    assert torch.equal(REFERENCE.linear(x.flip(0), weight).flip(0)[::6], alone)
    assert torch.equal(REFERENCE.linear(x[5:30], weight)[1::6], alone[1:5])
    assert torch.equal(REFERENCE.linear(x.t().contiguous().t(), weight)[::6], alone)


@pytest.mark.parametrize("op", [
    lambda x: REFERENCE.rms_norm(x, torch.arange(1.0, x.shape[-1] + 1), 1e-5),
    lambda x: REFERENCE.layer_norm(x, *torch.arange(1.0, 2 * x.shape[-1] + 1).chunk(2), 1e-5),
    lambda x: REFERENCE.silu_mul(x),
    lambda x: REFERENCE.gated(x, None, torch.eye(x.shape[-1]), None, "gelu_tanh"),
    lambda x: REFERENCE.gated(x, None, torch.eye(x.shape[-1]), None, "gelu"),
    lambda x: REFERENCE.rotate(x.view(len(x), -1, 16), *(x[:, None, :16] * sign for sign in (1, -1))),
    lambda x: REFERENCE.route(x, 5, renormalise=True)[0],
    lambda x: REFERENCE.route(x, 5, renormalise=False)[0],
], ids=["rms_norm", "layer_norm", "silu_mul", "gelu_tanh", "gelu", "rotate", "route-renormalised", "route"])
def test_reference_ops_of_a_row_do_not_see_its_neighbours(op, threads):
    x = torch.randn(129, 96)
    whole = op(x)
    for first, last in ((0, 1), (17, 19), (2, 129)):
        assert torch.equal(op(x[first:last].clone()), whole[first:last])
        assert torch.equal(op(torch.cat((torch.randn(3, 96), x[first:last])))[3:], whole[first:last])


@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_products_by_batches_of_one_size(count, monkeypatch):
    """As on a card, where the number of products in a call decides how each is summed."""
    a, b = torch.randn(count, 3, 40), torch.randn(count, 40, 5)
    calls = []
    whole = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: calls.append(a.shape[0]) or whole(a, b))
    found = bmm_by_batches(a, b)
    assert calls == [BATCH] * -(-count // BATCH)
    torch.testing.assert_close(found, whole(a, b))
