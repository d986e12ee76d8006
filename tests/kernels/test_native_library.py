"""How the native library is built, found and left out."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_kernels._native import build
from octavo_kernels._native.processor import INSTRUCTION_SETS, usable_instruction_sets

pytestmark = pytest.mark.kernels

needs_compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")),
    reason="this machine has no C++ compiler",
)


def test_processor_flags_choose_the_instruction_set():
    everything = set(INSTRUCTION_SETS[0].features)
    chosen = [
        usable_instruction_sets(present)[0].name
        for present in (
            everything | {"sse2", "amx_tile"},
            everything - {"avx512_bf16"},
            everything - {"avx512vl"},
            everything - {"f16c"},
            {"asimd", "fphp"},
        )
    ]
    assert chosen == ["avx512-bf16", "avx512", "avx2", "portable", "portable"]


needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="numba is not installed"
)

FASTEST = f"native ({usable_instruction_sets()[0].name})"

USE = """
import torch
from octavo_kernels import KVCacheShape, make_attention_backend, rms_norm
shape = KVCacheShape(1, 1, 16, 16, torch.float32)
print(make_attention_backend(shape, torch.device("cpu")).name)
print(rms_norm(torch.full((1, 4), 2.0), torch.ones(4), 0.0).tolist())
"""


WITHOUT_NUMBA = 'import sys\nsys.modules["numba"] = None\n'

# An installed numba that cannot be imported.
BROKEN_NUMBA = """
import importlib.machinery, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "numba" else None
    def create_module(self, spec):
        raise OSError("out of luck")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Broken())
"""


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout.splitlines(), stderr


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> Path:
    """Give a compiler that optimises nothing, for code that is hardly run, and notes its calls."""
    compiler = tmp_path_factory.mktemp("compiler") / "compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {compiler}-calls\nexec g++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    return compiler


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory, compiler) -> Path:
    """Give the cache of a process that has built the library."""
    cache = tmp_path_factory.mktemp("cache")
    assert finish(start(USE, cache, CXX=str(compiler)))[0][0] == FASTEST
    return cache


def libraries(cache: Path) -> list[str]:
    return [path.name for path in (cache / "octavo" / "kernels").iterdir()]


@needs_compiler
def test_two_processes_that_build_at_once_leave_one_whole_library_beside_a_half_one(
    tmp_path, compiler
):
    half = tmp_path / "octavo" / "kernels" / ".build-abandoned.so"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"\x7fELF")
    processes = [start(USE, tmp_path, CXX=str(compiler)) for _ in range(2)]
    for output, errors in [finish(process) for process in processes]:
        assert output == [FASTEST, "[[1.0, 1.0, 1.0, 1.0]]"]
        assert errors == ""
    (library,) = set(libraries(tmp_path)) - {half.name}
    assert library.startswith(f"octavo_kernels-{usable_instruction_sets()[0].name}-")


@needs_compiler
def test_a_cached_library_is_used_without_compiling(filled_cache, compiler):
    calls = compiler.with_name("compiler-calls")
    before = calls.read_text()
    assert finish(start(USE, filled_cache, CXX=str(compiler)))[0][0] == FASTEST
    assert calls.read_text() == before


@needs_compiler
@pytest.mark.parametrize("instructions", usable_instruction_sets(), ids=lambda each: each.name)
def test_the_environment_can_ask_for_any_instructions_that_the_processor_has(
    tmp_path, instructions
):
    """A compiler that copies what the tests have built already stands for one that takes long."""
    built = build.build_library(instructions)
    copier = tmp_path / "copier"
    copier.write_text(
        f'#!/bin/sh\necho "$@" >> {copier}-calls\n'
        f'while [ $# -gt 1 ]; do [ "$1" = -o ] && cp {built} "$2"; shift; done\n'
    )
    copier.chmod(0o755)
    chosen = {"CXX": str(copier), "OCTAVO_CPU_INSTRUCTIONS": instructions.name}
    output, errors = finish(start(USE, tmp_path / "cache", **chosen))
    assert output == [f"native ({instructions.name})", "[[1.0, 1.0, 1.0, 1.0]]"]
    assert errors == ""
    (library,) = libraries(tmp_path / "cache")
    assert library.startswith(f"octavo_kernels-{instructions.name}-")
    version, *commands = Path(f"{copier}-calls").read_text().splitlines()
    assert version == "--version"
    for command in commands:
        options = [each for each in command.split() if each.startswith("-m")]
        assert options == instructions.options


def test_instructions_that_nobody_knows_are_refused(tmp_path):
    process = start(USE, tmp_path, OCTAVO_CPU_INSTRUCTIONS="mmx")
    assert (
        "OCTAVO_CPU_INSTRUCTIONS is 'mmx' but must be unset or one of what this processor has, "
        in process.communicate()[1]
    )
    assert process.returncode != 0


@needs_compiler
def test_a_compiler_that_knows_no_vector_instructions_builds_portable_code(tmp_path, compiler):
    old = tmp_path / "compiler"
    no_vectors = 'case "$*" in *-mfma*) echo "what is fma?" >&2; exit 1;; esac'
    old.write_text(f'#!/bin/sh\n{no_vectors}\nexec {compiler} "$@"\n')
    old.chmod(0o755)
    output, errors = finish(start(USE, tmp_path / "cache", CXX=str(old)))
    assert output == ["native (portable)", "[[1.0, 1.0, 1.0, 1.0]]"]
    (library,) = libraries(tmp_path / "cache")
    assert library.startswith("octavo_kernels-portable-")
    if len(usable_instruction_sets()) > 1:
        assert errors == (f"using native code for portable only: {old} failed: what is fma?\n")


NO_COMPILER = (
    "no native code serves on the CPU, so all is slower: "
    "no C++ compiler is on the path; install g++ or set CXX\n"
)


@needs_numba
def test_without_a_compiler_one_warning_is_logged_and_numba_compiles_attention_once(tmp_path):
    def written() -> dict[Path, int]:
        (directory,) = (tmp_path / "octavo" / "kernels").iterdir()
        return {path: path.stat().st_mtime_ns for path in directory.iterdir()}

    states = []
    for _ in range(2):
        output, errors = finish(start(USE, tmp_path, PATH="", CXX=""))
        assert output == ["numba", "[[1.0, 1.0, 1.0, 1.0]]"]
        assert errors == NO_COMPILER
        states.append(written())
    assert {path.suffix for path in states[0]} == {".nbi", ".nbc"}
    assert states[1] == states[0]


def test_without_numba_one_warning_is_logged_and_torch_serves(tmp_path):
    output, errors = finish(start(WITHOUT_NUMBA + USE, tmp_path, PATH="", CXX=""))
    assert output[0] in ("folded torch", "reference")
    assert errors == NO_COMPILER


def test_a_numba_that_fails_is_reported_and_torch_serves(tmp_path):
    output, errors = finish(start(BROKEN_NUMBA + USE, tmp_path, PATH="", CXX=""))
    assert output[0] in ("folded torch", "reference")
    assert errors == NO_COMPILER + "numba cannot compile attention, so torch serves: out of luck\n"


def test_a_compiler_that_fails_leaves_nothing_behind_and_torch_serves(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "out of luck" >&2\nexit 1\n')
    compiler.chmod(0o755)
    output, errors = finish(start(WITHOUT_NUMBA + USE, tmp_path, CXX=str(compiler)))
    assert output[0] in ("folded torch", "reference")
    assert f"{compiler} failed: out of luck" in errors
    assert libraries(tmp_path) == []


def test_a_cache_directory_that_cannot_be_made_leaves_torch_to_serve(tmp_path):
    (tmp_path / "octavo").write_text("a file in the way")
    output, errors = finish(start(USE, tmp_path))
    assert output[0] in ("folded torch", "reference")
    assert "cannot be made" in errors


def test_a_cache_directory_that_cannot_be_written_leaves_torch_to_serve(tmp_path):
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "kernels").symlink_to("/proc/self")  # where not even root makes files
    output, errors = finish(start(WITHOUT_NUMBA + USE, tmp_path))
    assert output[0] in ("folded torch", "reference")
    assert "no native code serves on the CPU, so all is slower: " in errors


def test_a_cache_directory_is_its_owners_alone_to_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = build.cache_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    assert build.cache_directory().stat().st_mode & 0o777 == 0o755
    directory.chmod(0o777)
    monkeypatch.setattr("os.getuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(build.BuildError, match=r"kernels can be written by anyone, and what lies"):
        build.cache_directory()


def test_the_environment_can_ask_for_the_reference(tmp_path):
    output, errors = finish(start(USE, tmp_path, OCTAVO_KERNELS="reference"))
    assert output[0] == "reference"
    assert errors == ""
    assert not (tmp_path / "octavo").exists()


def test_another_choice_of_kernels_is_refused(tmp_path):
    process = start(USE, tmp_path, OCTAVO_KERNELS="fast")
    assert "OCTAVO_KERNELS is 'fast' but must be unset or 'reference'" in process.communicate()[1]
    assert process.returncode != 0


@needs_compiler
def test_native_code_shares_the_threads_of_torch(filled_cache, compiler):
    code = USE + (
        "maps = open('/proc/self/maps').read().split()\n"
        "runtimes = {x for x in maps if x.startswith('/') and 'omp' in x.rsplit('/', 1)[1]}\n"
        "print(len({x for x in runtimes if 'gomp' in x or 'libomp' in x or 'iomp' in x}))\n"
    )
    assert finish(start(code, filled_cache, CXX=str(compiler)))[0][-1] == "1"
