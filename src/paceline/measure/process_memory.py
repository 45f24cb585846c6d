"""What this process's memory consists of, as far as the system tells (Linux does).

A cache is reserved at the start, and the system gives a page of it when a block there is first written. So a process
grows while its cache has blocks that nobody has used yet, which is no leak: whoever looks for one looks at the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class ProcessMemory(NamedTuple):
    """Bytes that are resident: cache, files, heap and other are all there is."""

    cache: int
    """Pages of the tensors that are called the cache."""
    files: int
    """Mapped from files: libraries, and weights that are read where they lie."""
    heap: int
    """Of the C library's main heap, the cache apart."""
    other: int
    """Python's objects, large tensors, stacks, heaps of threads."""
    malloc_used: int
    malloc_free: int
    """What the C library has given out of all its heaps, and what it keeps there to give out again. Reserved, not
    resident: it may be more than `heap`. 0 where it is another library."""
    python_blocks: int
    """Python's small objects, by number."""


def process_memory(cache: Iterable[torch.Tensor]) -> ProcessMemory | None:
    """Now, with these tensors, in memory of the host, as the cache; None: the system does not tell."""
    try:
        counts = Path("/proc/self/statm").read_text().split()
        resident, files = (int(pages) * mmap.PAGESIZE for pages in counts[1:3])
        places = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
                  if line.endswith("[heap]")]
    except OSError:
        return None
    heaps = [range(int(begin, 16), int(end, 16)) for begin, end in places]
    heap, cached = sum(resident_bytes(one.start, len(one)) for one in heaps), 0
    for tensor in cache:
        given = resident_bytes(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        cached += given
        if any(tensor.data_ptr() in one for one in heaps):  # small ones lie there
            heap -= given
    used, free = _malloc()
    return ProcessMemory(cached, files, heap, max(0, resident - files - cached - heap), used, free,
                         sys.getallocatedblocks())


def resident_bytes(address: int, size: int) -> int:
    """Of so many bytes there, those on pages that the system has given; 0 where it does not tell."""
    begin = address - address % mmap.PAGESIZE
    pages = -(-(address + size - begin) // mmap.PAGESIZE)
    given = np.zeros(pages, dtype=np.uint8)
    if _c_library().mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE),
                       ctypes.c_void_p(given.ctypes.data)):
        return 0
    return int(np.count_nonzero(given & 1)) * mmap.PAGESIZE


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


@cache
def _c_library() -> Any:
    """Opened once: each time makes classes, which only the collector takes away again, and whoever looks every second
    would see those grow."""
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _Mallinfo2
    return library


def _malloc() -> tuple[int, int]:
    """Bytes in use and free in the C library's heaps."""
    library = _c_library()
    if not hasattr(library, "mallinfo2"):
        return 0, 0
    found = library.mallinfo2()
    return int(found.uordblks), int(found.fordblks)
