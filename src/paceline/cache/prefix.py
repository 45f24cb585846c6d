"""PrefixCache: which blocks hold the text a new prompt starts with. One hash chain, blocks of several groups on it."""

from __future__ import annotations

from collections.abc import Callable, KeysView, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple, Protocol

from paceline.kernels.groups import NULL_BLOCK

HashFunction = Callable[[int, tuple[int, ...], str], int]
"""(digest of the parent, tokens of the block, salt) -> digest. Salt is "" below the first block."""

DISABLED = "disabled"
"""Prefix caching is off for this engine."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""The request asked for the prompt's logprobs, so every prompt token has to be computed."""
TOO_SHORT = "shorter than a block"
"""Whole blocks are shared and the last token is always computed: such a prompt has nothing to share."""
NEVER_SEEN = "never seen"
"""No cached text goes on like this prompt."""
EVICTED = "evicted"
"""It was cached and had to make room."""
SALT = "salt"
"""Nothing is cached under this request's tenant and salt, or with its adapter. What lies under other salts is never
looked at, not even for this."""
NO_PREFIX = "no cached prefix"
"""All that is said where the cached texts may be somebody else's."""


def diverged(token: int) -> str:
    """Cached text agrees with the prompt up to (not including) the token at this index."""
    return f"diverged at token {token}"


def told_to_all(miss: str | None) -> str | None:
    """What may be said of a miss where the cached texts may be others': nothing that depends on them. Token by token,
    where a guess parts from a text tells the text."""
    return miss if miss in (None, DISABLED, PROMPT_LOGPROBS, TOO_SHORT) else NO_PREFIX


def default_hash(parent: int, tokens: tuple[int, ...], salt: str) -> int:
    """Fast, not collision-proof: a match compares tokens and ancestry, so a collision only costs a comparison. The same
    in every process, so that others can tell what a cache holds: Python hashes texts with a secret of the process."""
    return hash((parent, tokens, int.from_bytes(blake2b(salt.encode(), digest_size=7).digest()) if salt else 0))


def chain(tokens: Sequence[int], salt: str, block_size: int) -> list[int]:
    """The digests of a prompt's whole blocks, as far as they may be shared: the last token is always computed."""
    digests: list[int] = []
    digest = 0
    for at in range(0, len(tokens) - block_size, block_size):
        digest = default_hash(digest, tuple(tokens[at:at + block_size]), "" if digests else salt)
        digests.append(digest)
    return digests


class Cold(NamedTuple):
    """A host block that holds a node's KV, computed with `ahead` following."""

    block: int
    ahead: tuple[int, ...]


class Node:
    """One block of text after one particular beginning (`parent`); `blocks[g]` holds its KV in group g, or none."""

    __slots__ = ("ahead", "blocks", "children", "cold", "digest", "held", "key", "parent", "pins", "salt", "tokens",
                 "twin")

    def __init__(self, parent: Node | None, digest: int, tokens: tuple[int, ...], groups: int, salt: str = "") -> None:
        self.parent = parent
        self.digest = digest
        self.tokens = tokens
        self.salt = salt
        """Only the root of a salt's chain carries it."""
        self.blocks = [NULL_BLOCK] * groups
        self.held = 0
        """How many blocks hold its KV, those of `cold` counted."""
        self.cold: dict[int, Cold] | None = None
        """By group: where the host keeps its KV."""
        self.ahead: dict[int, tuple[int, ...]] | None = None
        """For groups with lookahead: the tokens after this block that its KV depends on too."""
        self.children: set[Node] = set()
        self.pins = 0
        """Running sequences whose text ends here and will go on from here."""
        self.twin: Node | None = None
        """Next node with the same digest."""
        self.key: int | None = None
        """What other processes call it (cache/keys.py), once anybody has asked."""

    def keeps(self, group: int) -> bool:
        """Whether its KV in `group` is anywhere."""
        return self.blocks[group] != NULL_BLOCK or (self.cold is not None and group in self.cold)


class BlockListener(Protocol):
    """Hears, in the engine's thread, which blocks hold a node's KV. `cold`: the host's, not the cache's own."""

    def stored(self, node: Node, group: int, cold: bool) -> None: ...

    def removed(self, node: Node, group: int, cold: bool) -> None: ...

    def cleared(self) -> None:
        """No block holds anything any more, here or on the host."""


class PrefixCache:
    """The chain's nodes, found by digest. A node lives while a block, a longer text or a running sequence needs it."""

    def __init__(self, lookaheads: Sequence[int], block_size: int, hash_function: HashFunction = default_hash,
                 remember: int = 65536) -> None:
        """`lookaheads` has one entry per group; `remember` bounds the memory of evicted digests."""
        self.lookaheads = tuple(lookaheads)
        self.block_size = block_size
        self._hash = hash_function
        self._remember = remember
        self._roots: dict[str, Node] = {}
        self._table: dict[int, Node] = {}
        self._evicted: dict[int, None] = {}
        self.node_of: list[dict[int, Node]] = [{} for _ in self.lookaheads]
        """Per group: registered block -> its node."""
        self.cold_node_of: list[dict[int, Node]] = [{} for _ in self.lookaheads]
        """Per group: host block -> the node whose KV it holds."""
        self.listener: BlockListener | None = None

    def root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, 0, (), 0, salt)
        return root

    def match(self, tokens: Sequence[int], salt: str, limit: int) -> list[Node]:
        """Nodes of the longest known beginning of `tokens`, at most `limit` blocks; their KV may be gone."""
        nodes: list[Node] = []
        parent = self._roots.get(salt)
        size = self.block_size
        while parent is not None and len(nodes) < limit:
            at = len(nodes) * size
            parent = self._find(parent, tuple(tokens[at:at + size]))[1]
            if parent is not None:
                nodes.append(parent)
        return nodes

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """The node for `tokens` after `parent`, made if it is new."""
        digest, node = self._find(parent, tokens)
        if node is None:
            node = Node(parent, digest, tokens, len(self.lookaheads))
            node.twin = self._table.get(digest)
            self._table[digest] = node
            parent.children.add(node)
            self._evicted.pop(digest, None)
        return node

    def attach(self, node: Node, group: int, block: int, ahead: tuple[int, ...]) -> bool:
        """`block` holds the node's KV in `group`, computed with `ahead` following. False: another block does."""
        if node.blocks[group] != NULL_BLOCK:
            return False
        node.blocks[group] = block
        node.held += 1
        if ahead:
            if node.ahead is None:
                node.ahead = {}
            node.ahead[group] = ahead
        self.node_of[group][block] = node
        if self.listener is not None:
            self.listener.stored(node, group, cold=False)
        return True

    def detach(self, group: int, block: int) -> None:
        """The block is about to hold something else."""
        node = self.node_of[group].pop(block)
        node.blocks[group] = NULL_BLOCK
        node.held -= 1
        if node.ahead is not None:
            node.ahead.pop(group, None)
        if self.listener is not None:
            self.listener.removed(node, group, cold=False)
        self._prune(node)

    def attach_cold(self, node: Node, group: int, block: int, ahead: tuple[int, ...]) -> None:
        """The host's `block` holds the node's KV in `group`, computed with `ahead` following; no other one does."""
        if node.cold is None:
            node.cold = {}
        node.cold[group] = Cold(block, ahead)
        node.held += 1
        self.cold_node_of[group][block] = node
        if self.listener is not None:
            self.listener.stored(node, group, cold=True)

    def detach_cold(self, group: int, block: int) -> None:
        """The host's block is about to hold something else."""
        node = self.cold_node_of[group].pop(block)
        if node.cold is not None:
            del node.cold[group]
        node.held -= 1
        if self.listener is not None:
            self.listener.removed(node, group, cold=True)
        self._prune(node)

    def pin(self, node: Node) -> None:
        node.pins += 1

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        self._prune(node)

    def covers(self, node: Node, group: int, tokens: Sequence[int], end: int) -> bool:
        """Whether the node, which ends before tokens[end], has KV in `group` that is right for what follows."""
        if node.blocks[group] == NULL_BLOCK:
            return False
        lookahead = self.lookaheads[group]
        return not lookahead or self.ahead_of(node, group) == tuple(tokens[end:end + lookahead])

    def covers_cold(self, node: Node, group: int, tokens: Sequence[int], end: int) -> bool:
        """The same of the host's KV."""
        cold = node.cold.get(group) if node.cold else None
        return cold is not None and cold.ahead == tuple(tokens[end:end + self.lookaheads[group]])

    def ahead_of(self, node: Node, group: int) -> tuple[int, ...]:
        """The tokens after the node that its block in `group` depends on."""
        return () if node.ahead is None else node.ahead.get(group, ())

    def explain(self, tokens: Sequence[int], salt: str, nodes: list[Node], usable: int) -> str:
        """Why only `usable` blocks could be shared although more would have been allowed; `nodes` as matched."""
        size = self.block_size
        if usable < len(nodes):
            for group, lookahead in enumerate(self.lookaheads):
                kept = nodes[usable].ahead
                if lookahead and kept is not None and group in kept:
                    end = (usable + 1) * size
                    common = common_prefix(kept[group], tokens[end:end + lookahead])
                    if common < lookahead:
                        return diverged(end + common)
            return EVICTED
        at = usable * size
        block = tuple(tokens[at:at + size])
        parent = nodes[-1] if nodes else self._roots.get(salt)
        digest = self._hash(parent.digest, block, parent.salt) if parent is not None else self._hash(0, block, salt)
        if digest in self._evicted:
            return EVICTED
        if parent is not None and parent.children:
            common = max(common_prefix(child.tokens, block) for child in islice(parent.children, 64))
            if common or nodes:
                return diverged(at + common)
        return SALT if salt and not nodes else NEVER_SEEN

    @property
    def known(self) -> KeysView[int]:
        """The digests of all nodes, as they come and go. A view: do not change the cache while you go through it."""
        return self._table.keys()

    def digests(self) -> list[int]:
        """Of all nodes: what texts are known here, to those who can hash them."""
        return list(self._table)

    def nodes(self) -> list[Node]:
        """Every node, roots aside. For checks: O(nodes)."""
        found = []
        for first in self._table.values():
            node: Node | None = first
            while node is not None:
                found.append(node)
                node = node.twin
        return found

    def _find(self, parent: Node, tokens: tuple[int, ...]) -> tuple[int, Node | None]:
        digest = self._hash(parent.digest, tokens, parent.salt)
        node = self._table.get(digest)
        while node is not None and not (node.parent is parent and node.tokens == tokens):
            node = node.twin
        return digest, node

    def _prune(self, node: Node) -> None:
        """Drop the node, and then its ancestors, if nothing needs them any more."""
        while not node.held and not node.pins and not node.children:
            parent = node.parent
            if parent is None:
                del self._roots[node.salt]
                return
            self._drop_from_table(node)
            self._evicted[node.digest] = None
            if len(self._evicted) > self._remember:
                del self._evicted[next(iter(self._evicted))]
            parent.children.remove(node)
            node = parent

    def _drop_from_table(self, node: Node) -> None:
        before = self._table[node.digest]
        if before is node:
            if node.twin is None:
                del self._table[node.digest]
            else:
                self._table[node.digest] = node.twin
            return
        while before.twin is not node:
            if before.twin is None:
                raise RuntimeError("a prefix node is missing from its table")
            before = before.twin
        before.twin = node.twin


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    count = 0
    for a, b in zip(left, right):
        if a != b:
            break
        count += 1
    return count
