"""Matrix products whose order of summation does not depend on the number of threads.

OpenBLAS and cuBLAS split a product over its outputs, which changes no sum. MKL may also split the inner axis when the
outputs are few for its threads (seen with 8 x 576 times 576 x 960 at 1 and 2 threads), so there a product runs on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, m, k] @ [B, k, n]; each of the B products is the same in any company."""
    with one_order(a.device):
        return torch.bmm(a, b)
