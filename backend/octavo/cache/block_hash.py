"""Names for the content of full blocks: chained strong hashes.

A block's key stands for all tokens from the start of its sequence to the block's end, and for what
else its KV depends on (the salt, the version of an adapter). Knows nothing of sequences or pools.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Tokens

_DIGEST_BYTES = 32

BlockKey = bytes
"""What a full block holds: the hash of all that comes before it, and its own tokens as they are.

Keys are compared whole, so blocks of other tokens are never taken for each other, whatever a table
of keys hashes them to.
"""


def root_hash(cache_salt: str, adapter_version: bytes = b"") -> bytes:
    """Return what stands for everything before a sequence's first block.

    Args:
        cache_salt: of its request.
        adapter_version: digest of what its adapter is, or empty without one.
    """
    salt = cache_salt.encode(errors="surrogatepass")
    length = len(adapter_version).to_bytes()
    return _digest(b"octavo-kv-root\0" + length + adapter_version + salt)


def chain_hash(key: BlockKey) -> bytes:
    """Return what stands for a block and everything before it: the parent of the next block."""
    return _digest(key)


def block_key(parent: bytes, token_ids: Tokens[int]) -> BlockKey:
    """Return the key of a full block.

    Args:
        parent: `chain_hash` of the block before it, or `root_hash`.
        token_ids: the block's tokens, each in [0, 2**31).
    """
    return parent + array("i", token_ids).tobytes()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
