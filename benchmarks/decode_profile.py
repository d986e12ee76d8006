"""Show where the time of a decode step of the demo model goes, on a CPU with native code.

    python -m benchmarks.decode_profile [--batches 1,8,32,64] [--context 200] [--rounds 30]

Each round runs one step of the engine, and beside it the parts of a step on the same shapes: every
layer's native calls over that layer's own weights and cache, so that they come from main memory as
in a step. Prints the median milliseconds of each, and its share of the step, as a table for docs;
`rest` is what is left of the step: embeddings, and the way between parts.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial

import click
import numpy as np
import torch
from benchmarks.doc_tables import markdown_table
from benchmarks.in_process import draw_prompt, load_engine, make_request
from benchmarks.quiet import quietly
from benchmarks.scheduling import time_steps
from benchmarks.script_options import COUNT, Counts

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.local.demo_model import demo_checkpoint
from octavo.model.loader import LoadedModel, load_model
from octavo_kernels import AttentionMetadata, PackedWeight, greedy
from octavo_kernels._native.attention import Batch, batch_of, cache_shape
from octavo_kernels._native.library import element_code, native_library, strides_of

Call = Callable[[], object]
SCHEDULING_STEPS = 200
PARTS = (
    "matrix products",
    "attention",
    "rotation and KV write",
    "norms",
    "sampling",
    "scheduling and batch building",
)


class StepParts:
    """The native calls of one decode step, with the sizes of `batch` sequences of one length."""

    def __init__(self, model: LoadedModel, batch: int, context: int) -> None:
        self.model, self.batch = model, batch
        self._threads = torch.get_num_threads()
        spec, size = model.spec, model.attention.shape.block_size
        blocks = -(-context // size)
        tables = torch.randperm(batch * blocks).view(batch, blocks).int()
        self._positions = torch.full((batch,), context - 1)
        self._slots = tables[:, (context - 1) // size].long() * size + (context - 1) % size
        self._cache = model.attention.allocate(batch * blocks)
        self._cache.storage.normal_()
        self._metadata = AttentionMetadata(
            query_start_loc=torch.arange(batch + 1).int(),
            seq_lens=torch.full((batch,), context).int(),
            block_tables=tables,
            slot_mapping=self._slots,
            max_query_len=1,
            max_seq_len=context,
        )
        kv_size = spec.num_kv_heads * spec.head_dim
        self._heads = self._rows(spec.num_heads * spec.head_dim + 2 * kv_size)
        self._hidden, self._residual = self._rows(spec.hidden_size), self._rows(spec.hidden_size)
        self._inner = self._rows(spec.intermediate_size)
        self._attended = self._rows(spec.num_heads * spec.head_dim)
        self._logits = self._rows(spec.vocab_size).float()

    def calls(self) -> dict[str, list[Call]]:
        """Return the calls of each part, in the order of a step."""
        calls: dict[str, list[Call]] = {name: [] for name in PARTS[:-1]}
        for index, layer in enumerate(self.model.decoder.weights.layers):
            for linear, x, out, name in (
                (layer.attention.qkv, self._hidden, self._heads, "linear"),
                (layer.attention.o, self._attended, self._hidden, "linear"),
                (layer.mlp.gate_up, self._hidden, self._inner, "silu_linear"),
                (layer.mlp.down, self._inner, self._hidden, "linear"),
            ):
                calls["matrix products"].append(self._product(linear.native, x, out, name))
            calls["attention"].append(self._attention(index))
            calls["rotation and KV write"].append(self._write(index))
            norms = (layer.input_norm.weight, layer.mlp_norm.weight)
            calls["norms"] += map(self._add_norm, norms)
        weights = self.model.decoder.weights
        head = (weights.lm_head.native, self._hidden, self._logits, "linear_to_float32")
        calls["matrix products"].append(self._product(*head))
        calls["norms"].append(self._add_norm(weights.final_norm.weight))
        calls["sampling"].append(partial(greedy, self._logits))
        return calls

    def _rows(self, width: int) -> torch.Tensor:
        return torch.randn(self.batch, width).to(self.model.dtype)

    def _product(
        self, weight: PackedWeight | None, x: torch.Tensor, out: torch.Tensor, name: str
    ) -> Call:
        assert weight is not None
        native = weight.native()
        strides = strides_of(x.stride(0), out.stride(0))
        return self._call(name, self._code, x, native, out, self.batch, strides, None)

    def _attention(self, layer: int) -> Call:
        spec, meta = self.model.spec, self._metadata
        batch: Batch = batch_of(meta.query_start_loc, meta.seq_lens, meta.block_tables, self.batch)
        return self._call(
            "paged_attention",
            *(self._shape, batch, self._heads, self._attended, *self._kv(layer), None),
            spec.num_heads // spec.num_kv_heads,
            strides_of(self._heads.stride(0), self._attended.stride(0)),
            *(spec.attention_scale, 0.0, spec.windows[layer] or 0),
        )

    def _write(self, layer: int) -> Call:
        spec = self.model.spec
        cos_sin = self.model.decoder.weights.layers[layer].attention.cos_sin
        heads = self._heads.view(self.batch, -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return self._call(
            "rope_and_write_kv_cache",
            *(self._shape, q, k, v, q, *self._kv(layer), self._positions, cos_sin, self._slots),
            *(self.batch, spec.num_heads, cos_sin.shape[1], len(cos_sin), 0),
            strides_of(*[heads.stride(0)] * 4),
        )

    def _add_norm(self, weight: torch.Tensor) -> Call:
        size, eps = self._hidden.shape[1], self.model.spec.norm.eps
        tensors = (self._hidden, self._residual, weight, self._hidden, self._residual)
        strides = strides_of(*[size] * 4)
        return self._call("add_rms_norm", self._code, *tensors, self.batch, size, strides, eps)

    @property
    def _code(self) -> int:
        return element_code(self.model.dtype)

    @property
    def _shape(self) -> object:
        return cache_shape(self._cache.storage, self.model.spec.head_dim)

    def _kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys[layer], self._cache.values[layer]

    def _call(self, name: str, *arguments: object) -> Call:
        """Return a native call of prepared arguments: nothing of Python's own is timed."""
        function = getattr(native_library(), f"octavo_{name}")
        prepared = [native_argument(argument) for argument in arguments]
        call: Call = partial(function, *prepared, self._threads)
        return call


def native_argument(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, ctypes.Structure):
        return ctypes.pointer(argument)
    return argument


def start_decoding(engine: Engine, batch: int, context: int, rounds: int) -> None:
    """Compute the prompts of a batch, so that the middle of its rounds is at `context`."""
    random = np.random.default_rng(batch)
    length = context - rounds // 2
    for _ in range(batch):
        engine.add(make_request(draw_prompt(random, length), rounds + 2))
    while any(each.num_computed_tokens < length for each in engine.scheduler.running) or (
        engine.scheduler.waiting.num_requests
    ):
        engine.step()


def time_ms(calls: list[Call]) -> float:
    started_s = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started_s) * 1e3


def profile(engine: Engine, model: LoadedModel, batch: int, context: int, rounds: int):
    """Return median milliseconds of each part, of the rest, and of the whole step."""
    memory = StepParts(model, batch, context)  # the calls know its addresses only
    parts = memory.calls()
    start_decoding(engine, batch, context, rounds)
    timings: dict[str, list[float]] = {name: [] for name in (*parts, "step")}
    for _ in range(rounds):
        timings["step"].append(time_ms([engine.step]))
        for name, calls in parts.items():
            timings[name].append(time_ms(calls))
    del memory
    while engine.has_unfinished:
        engine.step()
    medians = {name: statistics.median(each) for name, each in timings.items()}
    around = time_steps(batch, SCHEDULING_STEPS)
    medians[PARTS[-1]] = sum(statistics.median(each) for each in around.values()) * 1e3
    whole = medians.pop("step")
    rest = max(0.0, whole - sum(medians.values()))
    return {**medians, "rest": rest, "step": whole}


@click.command()
@click.option("--batches", "sizes", default="1,8,32,64", show_default=True, type=Counts())
@click.option("--context", default=200, show_default=True, type=COUNT)
@click.option("--rounds", default=30, show_default=True, type=COUNT)
def main(sizes: list[int], context: int, rounds: int) -> None:
    """Print the table."""
    if context <= rounds // 2:
        raise click.UsageError(f"--context {context} leaves no prompt for --rounds {rounds}")
    engine = load_engine(max_num_seqs=max(sizes), max_num_batched_tokens=1024)
    model = load_model(EngineConfig.from_mapping({"model": str(demo_checkpoint())}))
    if not model.attention.name.startswith("native"):
        raise click.ClickException(f"attention is {model.attention.name}, so there is no profile")
    columns = [quietly(partial(profile, engine, model, n, context, rounds)) for n in sizes]
    for size, (_, watch) in zip(sizes, columns, strict=True):
        if not watch.is_valid:
            click.echo(f"NO CLAIM for batch {size}: others {watch.foreign_share:.0%} of CPU")
    click.echo(f"{torch.get_num_threads()} threads, context {context}: ms (share of the step)\n")
    rows = [
        [name, *(f"{each[name]:.2f} ({each[name] / each['step']:.0%})" for each, _ in columns)]
        for name in columns[0][0]
    ]
    click.echo(markdown_table(["", *(f"batch {size}" for size in sizes)], rows), nl=False)


if __name__ == "__main__":
    main()
