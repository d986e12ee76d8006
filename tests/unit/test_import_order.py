"""Imports point one way, everywhere: the syntax trees of all packages are walked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "kernels", ROOT / "backend", ROOT / "client"]

#: Parts of `octavo`; each may import those before it, and its own modules.
ORDER = """
    errors free_memory host_resources interpreter
    parent_process process_end process_log request_keys restart_policy
    scheduling_params tenant_weights device_numbers structured_outputs
    sampling_params config option_docs request adapter
    cache.block_hash grammar sampling.token_rules beam_search sequence cache scheduler inspection
    sampling grammar_gate step_counter model
    local.demo_model executor engine static_engine engine_choice model_check
    engine_messages engine_process engine_host engine_link engine_client
    text local llm triton_model cli
""".split()

#: What a package may not import, beside what ORDER says.
FORBIDDEN = {
    "octavo_kernels": {"octavo", "octavo_client", "transformers"},
    "octavo_client": {"octavo", "octavo_kernels", "torch", "transformers"},
    "octavo.cache": {"torch", "octavo_kernels"},
    "octavo.scheduler": {"torch", "octavo_kernels"},
}
#: What only these parts may import.
RESERVED = {
    "triton_python_backend_utils": {"octavo.triton_model"},
    "octavo_client": {"octavo.cli", "octavo_client"},
}


def find_modules(folders: list[Path]) -> dict[str, Path]:
    modules = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def imported_names(path: Path) -> Iterator[str]:
    """Yield every dotted name a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("import_module", "__import__"):
                yield str(node.args[0].value)


def part_of(module: str) -> str:
    """Return `octavo.cache` for `octavo.cache.block_pool`, and the package of any other module."""
    names = module.split(".")
    if names[0] != "octavo":
        return names[0]
    return module if module.removeprefix("octavo.") in ORDER else ".".join(names[:2])


def place_of(part: str) -> int:
    return ORDER.index(part.removeprefix("octavo."))


def complaints(module: str, target: str) -> Iterator[str]:
    """Yield what is wrong with one import."""
    part, other = part_of(module), part_of(target)
    package, other_package = part.split(".")[0], other.split(".")[0]
    edge = f"{module} imports {target}"
    if target.startswith("."):
        yield f"{edge}: relative"
        return
    if other_package in FORBIDDEN.get(part, set()) | FORBIDDEN.get(package, set()):
        yield f"{edge}: forbidden"
    if other_package in RESERVED and part not in RESERVED[other_package]:
        yield f"{edge}: reserved"
    is_inside = package == other_package == "octavo" and "octavo" not in (part, other)
    if is_inside and place_of(other) > place_of(part):
        yield f"{edge}: upward"


def find_violations(folders: list[Path]) -> list[str]:
    """Return every import that breaks a rule, and every part that has no place in the order."""
    modules = find_modules(folders)
    parts = {part_of(module) for module in modules if module.startswith("octavo.")}
    unplaced = sorted(parts - {f"octavo.{name}" for name in ORDER})
    if unplaced:
        return [f"{part} has no place in ORDER" for part in unplaced]
    violations = []
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        for name in imported_names(path):
            target = name if name in modules else name.rpartition(".")[0] or name
            violations += complaints(module, target)
            if target in modules and module != "octavo":
                graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        violations.append("cycle: " + " imports ".join(error.args[1][::-1]))
    return violations


def test_no_import_points_upward():
    assert find_violations(PACKAGES) == []


def test_every_package_is_walked():
    modules = find_modules(PACKAGES)
    assert {"octavo_kernels.rms_norm", "octavo.engine", "octavo_client.client"} <= set(modules)
    assert {part_of(m) for m in modules if m.startswith("octavo.")} == {
        f"octavo.{p}" for p in ORDER
    }


def test_the_documented_order_is_the_order():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    section = text.split("## Import order", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^ {4}(\S.*)$", section, re.MULTILINE)
    assert [name for line in lines for name in re.split(r" {3,}", line)[0].split()] == ORDER


@pytest.mark.parametrize(
    ("module", "source", "violation"),
    [
        (
            "octavo.cache.pool",
            "from octavo.engine import Engine",
            "octavo.cache.pool imports octavo.engine: upward",
        ),
        (
            "octavo.cache.pool",
            "from octavo import engine",
            "octavo.cache.pool imports octavo.engine: upward",
        ),
        (
            "octavo.scheduler.late",
            "def f():\n    import octavo.executor.batch",
            "octavo.scheduler.late imports octavo.executor.batch: upward",
        ),
        (
            "octavo.request",
            "import importlib\nimportlib.import_module('octavo.engine')",
            "octavo.request imports octavo.engine: upward",
        ),
        (
            "octavo.cache.pool",
            "if x:\n    import torch.nn",
            "octavo.cache.pool imports torch: forbidden",
        ),
        ("octavo_client.x", "import octavo", "octavo_client.x imports octavo: forbidden"),
        (
            "octavo_kernels.x",
            "from octavo.errors import OctavoError",
            "octavo_kernels.x imports octavo.errors: forbidden",
        ),
        (
            "octavo.engine",
            "import triton_python_backend_utils as pb_utils",
            "octavo.engine imports triton_python_backend_utils: reserved",
        ),
        (
            "octavo.engine",
            "from octavo_client import Client",
            "octavo.engine imports octavo_client: reserved",
        ),
        ("octavo.engine", "from .errors import x", "octavo.engine imports .errors: relative"),
        ("octavo.gadget", "", "octavo.gadget has no place in ORDER"),
    ],
)
def test_a_planted_edge_is_found(tmp_path, module, source, violation):
    for name in ("octavo", "octavo.engine", "octavo.executor.batch", "octavo.errors", module):
        path = tmp_path / Path(*name.split(".")).with_suffix(".py")
        if name in ("octavo", "octavo_client"):
            path = tmp_path / name / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source if name == module else "")
    assert find_violations([tmp_path]) == [violation]


def test_a_planted_cycle_is_found(tmp_path):
    folder = tmp_path / "octavo" / "text"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from octavo.text.b import b\n")
    (folder / "b.py").write_text("def f():\n    from octavo.text import a\n")
    (violation,) = find_violations([tmp_path])
    assert violation.startswith("cycle: octavo.text.")


@pytest.mark.parametrize(
    "module",
    [
        "octavo",
        "octavo.cli",
        "octavo.scheduler.scheduler",
        "octavo.engine_client",
        "octavo_client",
        "octavo_client.cli",
    ],
)
def test_importing_costs_no_torch(module):
    code = f"import {module}, sys; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
