"""Names for the content of full blocks: chained strong hashes.

A block's key stands for all tokens from the start of its sequence to the block's end, and for what
else its KV depends on (the salt). Knows nothing of sequences or pools.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What a full block holds.

    `content` is the parent's hash and the block's tokens; two blocks are alike only if it is equal,
    for hashes alone could collide.
    """

    hash: bytes
    content: bytes


def root_hash(cache_salt: str) -> bytes:
    """Return what stands for the parent of a sequence's first block."""
    return _digest(b"octavo-kv-root\0" + cache_salt.encode(errors="surrogatepass"))


def block_key(parent: bytes, token_ids: Tokens[int]) -> BlockKey:
    """Return the key of a full block.

    Args:
        parent: hash of the block before it, or `root_hash`.
        token_ids: the block's tokens, each in [0, 2**31).
    """
    content = parent + array("i", token_ids).tobytes()
    return BlockKey(_digest(content), content)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
