"""Matrix products whose order of summation depends neither on the number of threads nor on what else is multiplied.

OpenBLAS splits a product over its outputs, which changes no sum. MKL may also split the inner axis when the outputs are
few for its threads (seen with 8 x 576 times 576 x 960 at 1 and 2 threads), so there a product runs on one. cuBLAS
may choose its kernel by the number of products as well (the likely reason why 19 of 30 texts of a latent model differed
in company on an H200; it was not looked at by itself),
so there each call has the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def one_order(device: torch.device) -> Iterator[None]:
    """Products inside sum in the same order at any thread count."""
    threads = torch.get_num_threads() if device.type == "cpu" and torch._C.has_mkl else 1
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


BATCH = 32
"""Products a call on a card."""


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, m, k] @ [B, k, n]; each of the B products is the same in any company."""
    if a.is_cuda:
        return bmm_by_batches(a, b)
    with one_order(a.device):
        return torch.bmm(a, b)


def bmm_by_batches(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """BATCH products a call, the last ones padded with zeros, and all laid out in the same way: where its factors lie
    also decides how a product is summed."""
    count = a.shape[0]
    if not count:
        return torch.bmm(a, b)
    padded_a, padded_b = (F.pad(part, (0, 0, 0, 0, 0, -count % BATCH)).contiguous() for part in (a, b))
    parts = [torch.bmm(padded_a[begin:begin + BATCH], padded_b[begin:begin + BATCH])
             for begin in range(0, count, BATCH)]
    return torch.cat(parts)[:count]
