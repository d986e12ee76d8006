"""Compile kernels to machine code for a GPU that this machine need not have.

Knows how the Triton language is asked for machine code and what the machine code uses; knows no
kernel. catalog lists them.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo_kernels._launch import Architecture

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_MATRIX_INSTRUCTION = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.\S+|v_mfma_\w+")
_INPUT_ORDER = re.compile(r"kWidth = \d+")


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel with all that decides its machine code, besides the architecture."""

    kernel: Any
    """What `triton.jit` made."""
    dtype: str
    """Type of the tensors it computes on, by the language's name: fp32, bf16 or fp16; and behind a
    hyphen that of a weight of 8 bits."""
    types: Sequence[str]
    """Types of the arguments before the constants: "*bf16" for a pointer, "i32", "fp32"."""
    constants: Mapping[str, int]
    """Values of its constants, by name."""
    num_warps: int
    num_stages: int = 3
    """The language's own default."""
    fp_fusion: bool = True
    """Whether multiplications and additions may become one instruction."""

    @property
    def name(self) -> str:
        """What sets it apart from any other case, in words."""
        constants = " ".join(f"{name}={int(value)}" for name, value in self.constants.items())
        kernel = self.kernel.__name__.removesuffix("_kernel")
        return f"{kernel} {self.dtype} {constants} warps={self.num_warps} stages={self.num_stages}"


@dataclass(frozen=True, slots=True)
class Resources:
    """What the machine code of a kernel uses."""

    registers: int
    """Of a thread; of an AMD GPU's those that differ between the threads of a warp."""
    stack_bytes: int
    """Of a thread, in device memory: registers that did not suffice are spilled there."""
    shared_bytes: int
    """Of a program."""
    matrix_instructions: frozenset[str]
    """Names of the instructions that multiply matrices, with the sizes of their operands."""
    input_orders: frozenset[str]
    """How many neighbouring inputs a thread holds of each operand, where instructions take them
    from threads: this says in which order they take the inputs of a product."""


def case_dtype(dtype: str, weight: str) -> str:
    """Return a case's `dtype` of the types of rows and of the weight they are multiplied by."""
    return dtype if weight == dtype else f"{dtype}-{weight}"


def compile_case(case: KernelCase, architecture: Architecture) -> Resources:
    """Compile a case for one architecture and return what its machine code uses.

    Pointers, and integers by which the kernel is specialised, are taken to be multiples of 16, as
    those of models are.
    """
    names = case.kernel.arg_names
    arguments = dict(zip(names, case.types, strict=False))
    free = {name for name in names if name in case.kernel.do_not_specialize}
    multiples = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(arguments.items())
        if (kind.startswith("*") or kind in ("i32", "i64")) and name not in free
    }
    source = ASTSource(
        case.kernel,
        {name: arguments.get(name, "constexpr") for name in names},
        dict(case.constants),
        multiples,
    )
    compiled = triton.compile(
        source,
        target=_target(architecture),
        options={
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "enable_fp_fusion": case.fp_fusion,
        },
    )
    usage = _amd_usage if isinstance(architecture, str) else _nvidia_usage
    registers, stack = usage(compiled.asm)
    text = compiled.asm["amdgcn" if isinstance(architecture, str) else "ptx"]
    return Resources(
        *(registers, stack, compiled.metadata.shared),
        frozenset(_MATRIX_INSTRUCTION.findall(text)),
        frozenset(_INPUT_ORDER.findall(compiled.asm["ttgir"])),
    )


def _target(architecture: Architecture) -> GPUTarget:
    if isinstance(architecture, str):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", architecture, 32)


def _nvidia_usage(code: Mapping[str, Any]) -> tuple[int, int]:
    """Return the registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        command = [str(_TOOL), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise ValueError(f"cuobjdump reported {report!r} but must report registers and stack")
    return int(found[1]), int(found[2])


def _amd_usage(code: Mapping[str, Any]) -> tuple[int, int]:
    """Return the vector registers and bytes of stack of a thread, from the code's own notes."""
    notes = dict(re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", code["amdgcn"], re.MULTILINE))
    return int(notes["vgpr_count"]), int(notes["private_segment_fixed_size"])
