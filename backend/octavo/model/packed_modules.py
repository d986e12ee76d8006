"""Puts packed weights in the place of a model's linear layers.

A layer's plain weight is dropped as soon as it is packed, and an embedding that shares it reads the
packed one. Knows torch's modules, and nothing of any architecture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.pytorch_utils import Conv1D

from octavo.model.layers import Embedding, PackedLinear, packed_bytes
from octavo.model.scratch import Scratch
from octavo_kernels import packs_weights

_LINEAR = (torch.nn.Linear, Conv1D)

LinearMaker = Callable[..., PackedLinear]
"""PackedLinear, or what makes one of the same arguments."""


class PackedModule(torch.nn.Module):
    """A linear layer of a packed weight."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in] multiplied, [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        shape = (*x.shape[:-1], self.linear.out_features)
        return self.linear(rows).view(shape) if len(rows) else x.new_empty(shape)


class PackedEmbedding(torch.nn.Module):
    """An embedding of a weight that a projection has packed."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token_ids [...], [..., hidden]."""
        return self.embedding(token_ids.reshape(-1)).view(*token_ids.shape, -1)


def pack_modules(model: torch.nn.Module, make_linear: LinearMaker) -> None:
    """Replace every linear layer of a model, and the embeddings that share a weight with one.

    Layers of a class derived from torch's may do more, and stay as they are, as does a layer that
    shares a weight with an embedding of such a class.
    """
    scratch: Scratch | None = None
    for name, embeddings in _packed_names(model):
        weight = model.get_submodule(name).get_parameter("weight")
        scratch = scratch or Scratch(weight.dtype, weight.device)
        _pack(model, name, embeddings, make_linear, scratch)


def weight_bytes(model: torch.nn.Module, *, of_8_bits: bool) -> int:
    """Return what a model's weights take once its layers are packed, but for padding.

    Args:
        model: not packed yet; it may have shapes alone.
        of_8_bits: whether packed weights are of 8 bits.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    for name, embeddings in _packed_names(model) if of_8_bits else ():
        module = model.get_submodule(name)
        weight = module.get_parameter("weight")
        shape = weight.shape[::-1] if isinstance(module, Conv1D) else weight.shape
        total += packed_bytes(shape, weight.dtype, of_8_bits=True)
        total -= 0 if embeddings else weight.nbytes
    return total


def _packed_names(model: torch.nn.Module) -> list[tuple[str, list[str]]]:
    """Return the layers that are packed, each with the embeddings that share its weight."""
    plain: dict[int, list[str]] = {}
    derived: set[int] = set()
    for name, module in model.named_modules():
        if type(module) is torch.nn.Embedding:
            plain.setdefault(id(module.weight), []).append(name)
        elif isinstance(module, torch.nn.Embedding):
            derived.add(id(module.weight))
    # Names and not modules, which would keep every weight until the last is packed.
    names = [name for name, module in model.named_modules() if type(module) in _LINEAR]
    keys = {name: id(model.get_submodule(name).weight) for name in names}
    return [(name, plain.get(key, [])) for name, key in keys.items() if key not in derived]


def leave_files(model: torch.nn.Module) -> None:
    """Copy what is left of a model's tensors to memory of their own; they may lie in a file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _pack(
    model: torch.nn.Module,
    name: str,
    embeddings: list[str],
    make_linear: LinearMaker,
    scratch: Scratch,
) -> None:
    module = model.get_submodule(name)
    weight, bias = module.get_parameter("weight").detach(), module.bias
    if isinstance(module, Conv1D):
        weight = scratch.take(weight.shape[::-1]).copy_(weight.t())
    elif not packs_weights(weight.dtype, weight.device):
        weight = weight.clone()  # it is kept, and may lie in a file
    linear = make_linear(weight, bias.detach().clone() if isinstance(bias, torch.Tensor) else None)
    if linear.keeps_weight:
        scratch.leave()
    model.set_submodule(name, PackedModule(linear))
    for embedding in embeddings:
        model.set_submodule(embedding, PackedEmbedding(Embedding(weight, linear)))
