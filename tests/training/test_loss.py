"""The loss against what it says, and its gradients against autograd's."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.training import loss as losses
from paceline.training.acceptance import Acceptance, summary
from paceline.training.loss import Judge, Weights, compare


def judge(head: torch.Tensor, ids: torch.Tensor, weights: Weights, piece: int = 3, whole: bool = False) -> Judge:
    target: Any = SimpleNamespace(head=head, device=torch.device("cpu"), capped=lambda logits: logits)
    out = Judge(target, ids, weights, compiles=False, whole=whole)
    out.piece = piece
    return out


def test_a_case_by_hand() -> None:
    # q is even over two tokens; the target gives them .5 and .25, and the rest to a token that cannot be drafted.
    p = torch.tensor([[0.5, 0.25]])
    lost, accepted, slope = compare(torch.zeros(1, 2), p.log(), torch.zeros(1), torch.ones(1), 0.1, 0.9, torch.float32)
    assert accepted.item() == pytest.approx(0.75)  # min(.5, .5) + min(.25, .5)
    assert lost.item() == pytest.approx(0.1 * 0.75 * 0.6931472 + 0.9 * (0.25 + 0.25))
    # By the first logit: .1 (q sum p - p) = .1 (.375 - .5); sign is (0, 1), so .9 q (0 - .5).
    assert slope[0, 0].item() == pytest.approx(0.1 * -0.125 + 0.9 * 0.5 * -0.5)
    assert slope[0, 1].item() == pytest.approx(0.1 * 0.125 + 0.9 * 0.5 * 0.5)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_gradients_are_those_of_autograd(dtype: torch.dtype, near: float, whole: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", partial(torch.randn, dtype=dtype))
    torch.manual_seed(0)
    vocab, width, rank, count = 23, 6, 3, 8
    head, ids = torch.randn(vocab, width), torch.tensor([1, 4, 5, 9, 17, 22])
    hidden, markov, up = torch.randn(count, width), torch.randn(count, rank), torch.randn(len(ids), rank)
    final, weight = torch.randn(count, width), torch.rand(count, dtype=dtype)
    weight[2] = 0.0
    leaves = [one.clone().requires_grad_() for one in (hidden, markov, up)]
    normaliser = (final @ head.T).logsumexp(-1)
    total, accepted = judge(head, ids, Weights(0.3, 0.7), whole=whole).loss(*leaves, final, normaliser, weight)
    (2.0 * total).backward()

    plain = [one.clone().requires_grad_() for one in (hidden, markov, up)]
    known, bias = ids, plain[1] @ plain[2].T
    if whole:  # where the Markov head knows a part of the tokens
        ids, bias = torch.arange(vocab), torch.zeros(count, vocab, dtype=dtype).index_add(1, known, bias)
    q = (plain[0] @ head[ids].T + bias).softmax(-1)
    p = (final @ head.T).softmax(-1)
    distance = (q - p[:, ids]).abs().sum(-1) + 1.0 - p[:, ids].sum(-1)
    expected = ((0.3 * -(p[:, ids] * q.log()).sum(-1) + 0.7 * distance) * weight).sum()
    (2.0 * expected).backward()
    assert total.item() == pytest.approx(expected.item(), rel=near)
    torch.testing.assert_close(accepted, torch.minimum(q, p[:, ids]).sum(-1).detach(), rtol=near, atol=near)
    for one, other in zip(leaves, plain):
        torch.testing.assert_close(one.grad, other.grad, rtol=near, atol=near / 100)


def test_without_a_markov_head() -> None:
    torch.manual_seed(1)
    head, hidden = torch.randn(9, 4), torch.randn(5, 4, requires_grad=True)
    found = judge(head, torch.arange(9), Weights(1.0, 0.0))
    final = torch.randn(5, 4)
    total, _ = found.loss(hidden, None, None, final, (final @ head.T).logsumexp(-1), torch.ones(5))
    wanted = -((final @ head.T).softmax(-1) * (hidden @ head.T).log_softmax(-1)).sum()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert found.best(hidden.detach(), None, None).tolist() == (hidden @ head.T).argmax(-1).tolist()


def test_logits_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PIECE_BYTES", 4 * 9 * 32)
    found = Judge(judge(torch.randn(9, 4), torch.arange(9), Weights(1, 1)).target, torch.arange(9), Weights(1, 1),
                  compiles=False)
    assert found.piece == 32


def test_cycles_are_replayed() -> None:
    found = Acceptance(3)
    # Tokens 2.. are the answer. At 2 two drafts are right, so the next newest is 5; there none; at 6 all that is left.
    found.replay([9, 9, 2, 0, 0, 0, 5, 0, 0], 2, 9)
    assert (found.cycles, found.tokens) == (3, 3 + 1 + 2)
    assert found.tried == [3, 2, 1] and found.right == [2, 2, 0]
    assert summary([found]) == {"tokens_per_cycle": {"3": 2.0}, "by_position": [0.6667, 1.0, 0.0]}
