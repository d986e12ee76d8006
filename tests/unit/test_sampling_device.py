"""What the sampler sends to a device arrives as it was, in one piece."""

from __future__ import annotations

import numpy as np
import torch

from octavo.sampling.device import HostCopy, pack, to_device, unpack

ARRAYS = [
    np.array([1.5, -2.0, np.inf], np.float32),
    np.array([], np.int64),
    np.array([-(2**63), 2**63 - 1, 7], np.int64),
    np.array([2**31 - 1], np.int32),
]


def test_arrays_arrive_as_they_were():
    for arrived in (unpack(pack(ARRAYS), ARRAYS), to_device(ARRAYS, torch.device("cpu"))):
        for tensor, array in zip(arrived, ARRAYS, strict=True):
            assert tensor.dtype == torch.from_numpy(array).dtype
            assert tensor.tolist() == array.tolist()


def test_every_array_begins_where_kernels_are_compiled_for():
    first, *others = unpack(pack(ARRAYS), ARRAYS)
    assert [(other.data_ptr() - first.data_ptr()) % 16 for other in others] == [0, 0, 0]
    assert pack([]).numel() == 0


def test_results_come_back_as_lists():
    copy = HostCopy([torch.tensor([3, -1]), torch.tensor([0.5])])
    assert copy.wait() == [[3, -1], [0.5]]
