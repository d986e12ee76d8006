"""What a checkpoint calls the tensors of a mixture of experts, within a layer.

transformers holds the experts of a layer joined, and writes them one by one. Knows nothing of
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.model.spec import ExpertSpec


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of weights, without their ending."""

    router: str
    experts: str
    """What those of an expert begin with, before its number."""
    gate: str
    up: str
    down: str

    def of(self, expert: int) -> tuple[str, str, str]:
        """Return the names of an expert's gate, up and down."""
        gate, up, down = (
            f"{self.experts}.{expert}.{name}" for name in (self.gate, self.up, self.down)
        )
        return gate, up, down


_NAMES = {
    "mlp": ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ExpertNames(
        "block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"
    ),
}


def expert_names(experts: ExpertSpec) -> ExpertNames:
    """Return the names of a spec's experts."""
    return _NAMES[experts.stored]


def expert_tensors(experts: ExpertSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the name within a layer and the shape of every tensor of a mixture of experts."""
    names, inner = expert_names(experts), experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (experts.num_experts, hidden)}
    for index in range(experts.num_experts):
        gate, up, down = names.of(index)
        shapes |= dict.fromkeys((f"{gate}.weight", f"{up}.weight"), (inner, hidden))
        shapes[f"{down}.weight"] = (hidden, inner)
    return shapes
