"""Keys: what other processes call a block of text. The same text in the same scope has the same keys everywhere."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from paceline.cache.prefix import Node

SCOPE_BYTES = 16


def scope_key(scope: str) -> bytes:
    """All that others learn of a scope: whether it is the same one. Nothing for the scope of those who have none."""
    return hashlib.sha256(b"scope " + scope.encode()).digest()[:SCOPE_BYTES] if scope else b""


def block_key(parent: int | None, tokens: Sequence[int], scope: bytes) -> int:
    """64 bits for a block of text after one particular beginning: that of its parent, or of a scope (scope_key). The
    prefix cache never goes by it: two texts with one key cost a router a wrong guess and nobody a wrong text."""
    before = b"first " + scope if parent is None else b"after " + parent.to_bytes(8, "big")
    hashed = hashlib.sha256(struct.pack(f"<B{len(tokens)}Q", len(before), *tokens) + before)
    return int.from_bytes(hashed.digest()[:8], "big")


def chain_keys(tokens: Sequence[int], scope: str, block_size: int) -> list[int]:
    """Of the whole blocks of a text, the first one's first."""
    keys: list[int] = []
    own = scope_key(scope)
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(block_key(keys[-1] if keys else None, tokens[end - block_size:end], own))
    return keys


def scope_of(node: Node) -> str:
    """The scope of the chain that a node is on."""
    while node.parent is not None:
        node = node.parent
    return node.salt


def key_of(node: Node) -> int:
    """A node's key, worked out once. Nothing that it reads of a node ever changes, so any thread may ask."""
    unnamed: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None and at.key is None:
        unnamed.append(at)
        at = at.parent
    own = scope_key(scope_of(node)) if at is None or at.parent is None else b""
    for one in reversed(unnamed):
        parent = one.parent
        assert parent is not None
        one.key = block_key(None if parent.parent is None else parent.key, one.tokens, own)
    assert node.key is not None
    return node.key


def parent_key(node: Node) -> int | None:
    """None: it begins a text."""
    parent = node.parent
    return None if parent is None or parent.parent is None else key_of(parent)
