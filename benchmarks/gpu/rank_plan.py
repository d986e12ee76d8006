"""What several GPUs should reach at best: times of a step by bytes, operations and latencies.

Pure arithmetic over data sheets, of the exchange as `ProcessGroups` makes it. Nothing here was
measured; `scripts/gpu-check --only ranks` measures what it speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = 2
"""Of bfloat16."""

#: Seconds of an exchange of nothing over NVLink, by ranks of the group: assumed.
LATENCY_S = {1: 0.0, 2: 8e-6, 4: 10e-6, 8: 14e-6}
#: Seconds of the host for each operation that it launches: assumed.
LAUNCH_S = 5e-6
#: Operations of a layer that are not part of a sum: norms, products, rope, attention, activation.
LAYER_OPERATIONS = 10
#: What the weights, and all steps at once, may take of a GPU's memory.
MEMORY_SHARE = 0.9
#: The floor's share of a step that is to be met, by sequences, as on one GPU.
FLOOR_SHARES = {1: 0.85, 32: 0.75, 256: 0.75}


@dataclass(frozen=True, slots=True)
class Gpu:
    """The data sheet of a GPU."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    """Of its memory."""
    flops: float
    """Of dense bfloat16 products, a second."""
    link_bytes_per_s: float
    """Of NVLink, in one direction."""


H200 = Gpu("H200", 141e9, 4.8e12, 989e12, 450e9)
H100 = Gpu("H100", 80e9, 3.35e12, 989e12, 450e9)


def planned_gpu(device_name: str) -> Gpu | None:
    """Return the data sheet of a device by the name that its driver gives it, if there is one."""
    return next((gpu for gpu in (H200, H100) if gpu.name in device_name), None)


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a model of the Llama family."""

    name: str
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.num_heads

    @property
    def layer_numbers(self) -> int:
        """Weights of a layer's products."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden * (qkv + self.hidden + 3 * self.inner)


LLAMA_8B = Model("Llama 3.1 8B", 32, 4096, 14_336, 32, 8, 128_256)
LLAMA_70B = Model("Llama 3.1 70B", 80, 8192, 28_672, 64, 8, 128_256)


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor group of `tp` ranks in each of `pp` stages."""

    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"pp {self.pp}" if self.tp == 1 and self.pp > 1 else f"tp {self.tp}"


@dataclass(frozen=True, slots=True)
class StageStep:
    """What the last stage, which has the most to do, does of one step; bytes are one rank's."""

    weight_bytes: float
    kv_bytes: float
    sent_bytes: float
    """By the sums."""
    memory_s: float
    """To read weights and KV, or to compute, whichever takes longer."""
    exchange_s: float
    """Of sums, logits, and the state from the stage before."""
    adding_s: float
    """To add what the sums exchange, which the memory bounds."""
    launch_s: float
    """Of the host, without CUDA graphs."""

    @property
    def floor_s(self) -> float:
        """What the device takes at best."""
        return self.memory_s + self.exchange_s + self.adding_s


def sum_bytes(num_tokens: int, hidden: int, tp: int, item_bytes: int = ITEM_BYTES) -> int:
    """Return what a rank sends for one sum over a tensor group: its own terms, to each other."""
    return (tp - 1) * num_tokens * hidden * item_bytes


def num_sums(num_layers: int, *, is_first_stage: bool) -> int:
    """Return the sums of a stage: two a layer, and the embedding's."""
    return 2 * num_layers + is_first_stage


def added_bytes(num_tokens: int, hidden: int, tp: int) -> int:
    """Return the bytes of memory that adding a sum's terms one by one in float32 moves."""
    if tp == 1:
        return 0
    first, each, last = ITEM_BYTES + 4, 4 + ITEM_BYTES + 4, 4 + ITEM_BYTES
    return num_tokens * hidden * (first + (tp - 1) * each + last)


def stage_step(
    gpu: Gpu, model: Model, grid: Grid, num_tokens: int, kv_tokens: int, num_rows: int
) -> StageStep:
    """Return a step of the last stage.

    Args:
        gpu: of every rank.
        model: whose layers the stages divide evenly.
        grid: the ranks.
        num_tokens: computed in the step.
        kv_tokens: whose keys and values it reads.
        num_rows: of logits.
    """
    tp, layers = grid.tp, model.num_layers // grid.pp
    numbers = (layers * model.layer_numbers + model.vocab * model.hidden) / tp
    heads = max(1.0, model.num_kv_heads / tp)
    kv_bytes = kv_tokens * layers * 2 * heads * model.head_dim * ITEM_BYTES
    head_flops = 2 * num_rows * model.vocab * model.hidden / tp
    flops = 2 * num_tokens * layers * model.layer_numbers / tp + head_flops
    sums = num_sums(layers, is_first_stage=grid.pp == 1) if tp > 1 else 0
    bytes_a_sum = sum_bytes(num_tokens, model.hidden, tp)
    exchange_s = sums * (LATENCY_S[tp] + bytes_a_sum / gpu.link_bytes_per_s)
    if tp > 1:
        logits_bytes = (tp - 1) * num_rows * model.vocab / tp * ITEM_BYTES
        exchange_s += LATENCY_S[tp] + logits_bytes / gpu.link_bytes_per_s
    if grid.pp > 1:
        state_bytes = num_tokens * model.hidden * ITEM_BYTES
        exchange_s += LATENCY_S[2] + state_bytes / gpu.link_bytes_per_s
    # Of a sum: gather, widen, add all others, narrow.
    operations = layers * LAYER_OPERATIONS + sums * (tp + 2)
    return StageStep(
        weight_bytes=numbers * ITEM_BYTES,
        kv_bytes=kv_bytes,
        sent_bytes=sums * bytes_a_sum,
        memory_s=max(numbers * ITEM_BYTES / gpu.bytes_per_s, flops / gpu.flops)
        + kv_bytes / gpu.bytes_per_s,
        exchange_s=exchange_s,
        adding_s=sums * added_bytes(num_tokens, model.hidden, tp) / gpu.bytes_per_s,
        launch_s=operations * LAUNCH_S,
    )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What decoding should reach."""

    step: StageStep
    """Of a stage, over its share of the sequences."""
    fits: bool
    """Whether weights and KV have room."""
    tokens_per_s: float
    """To be met as it is: several ranks launch every operation."""
    recorded_tokens_per_s: float
    """To be met if steps were replayed as CUDA graphs, as one GPU's are."""


def decode_plan(gpu: Gpu, model: Model, grid: Grid, batch: int, context: int) -> DecodePlan:
    """Return what `batch` sequences of `context` tokens should reach; every stage has some."""
    in_flight = min(batch, grid.pp)
    rows = batch // in_flight
    step = stage_step(gpu, model, grid, rows, rows * context, rows)
    held_bytes = step.weight_bytes + in_flight * step.kv_bytes
    if grid.pp == 1:  # the embedding, which a step reads few rows of
        held_bytes += model.vocab * model.hidden / grid.tp * ITEM_BYTES
    recorded_s = step.floor_s / FLOOR_SHARES[batch]
    is_alone = grid == Grid()
    step_s = recorded_s if is_alone else max(recorded_s, step.launch_s)
    # A request alone passes all stages, one after the other.
    scale = rows * in_flight / grid.pp
    return DecodePlan(
        step, held_bytes <= MEMORY_SHARE * gpu.memory_bytes, scale / step_s, scale / recorded_s
    )


def sliced_exchange_s(gpu: Gpu, model: Model, tp: int, num_tokens: int) -> float:
    """Return the exchange of a step's sums if each rank added one slice of them for all.

    Each slice goes to the rank that adds it, in the order of ranks, and back to all.
    """
    state_bytes = num_tokens * model.hidden * ITEM_BYTES
    each_s = 2 * LATENCY_S[tp] + 2 * (tp - 1) / tp * state_bytes / gpu.link_bytes_per_s
    return num_sums(model.num_layers, is_first_stage=True) * each_s
