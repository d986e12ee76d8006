"""A block's key stands for everything its KV depends on, and for nothing else."""

from __future__ import annotations

from octavo.cache.block_hash import block_key, chain_hash, root_hash


def test_equal_pasts_have_equal_keys():
    first = block_key(root_hash("salt"), [1, 2, 3, 4])
    assert block_key(root_hash("salt"), (1, 2, 3, 4)) == first
    assert block_key(chain_hash(first), [5, 6]) == block_key(chain_hash(first), [5, 6])


def test_a_key_depends_on_tokens_their_order_the_parent_the_salt_and_the_adapter():
    parent = chain_hash(block_key(root_hash(""), [0, 0]))
    keys = [
        block_key(root_hash(""), [1, 2]),
        block_key(root_hash(""), [2, 1]),
        block_key(root_hash("salt"), [1, 2]),
        block_key(root_hash("", b"version 1"), [1, 2]),
        block_key(root_hash("", b"version 2"), [1, 2]),
        block_key(root_hash("version 1"), [1, 2]),
        block_key(root_hash("1", b"version "), [1, 2]),
        block_key(parent, [1, 2]),
    ]
    assert len(set(keys)) == len(set(map(chain_hash, keys))) == 8


def test_tokens_do_not_run_into_each_other():
    assert block_key(b"", [1, 23]) != block_key(b"", [12, 3])
    assert block_key(b"", [256]) != block_key(b"", [0, 1])


def test_hashes_are_strong_and_salts_may_be_any_text():
    assert len(chain_hash(block_key(root_hash("\ud800 \N{SNOWMAN}"), [2**31 - 1]))) == 32
    assert root_hash("a") != root_hash("b")
