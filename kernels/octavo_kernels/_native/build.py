"""Compile the C++ sources beside this file into shared libraries in the user's cache directory.

There is one library for each instruction set that is asked for. Its name ends in a hash of
everything that shapes its machine code (sources, options, compiler and its version, processor
features, OpenMP runtime), so a cache shared by different machines or survived by an upgrade never
serves a stale build. Knows nothing of tensors or of the functions in the library.
"""

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo_kernels._native.processor import InstructionSet, describe_processor

_SOURCE_DIR = Path(__file__).parent
_SOURCES = tuple(
    f"{name}.cpp"
    for name in (
        "rowwise kv_cache attention linear linear_int8 adapters embedding layers sample logits"
        " shared_exchange"
    ).split()
)
_HEADERS = tuple(
    f"{name}.h"
    for name in (
        "vector elements activation kv_cache rope attention_tile attention_items linear linear_tile"
        " linear_int8 adapters operations logits shared_exchange"
    ).split()
)
_OPTIONS = (
    "-std=c++17 -O3 -fPIC -fopenmp"
    " -ffp-contract=off"  # the sources choose what is fused, so that bits do not depend on inlining
    " -fno-strict-aliasing -Wno-psabi"
).split()
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_TIMEOUT_S = 300


class BuildError(Exception):
    """The library cannot be built on this machine; the message says why."""


def build_library(instructions: InstructionSet) -> Path:
    """Return the path of the library for an instruction set, compiled unless the cache has it.

    Safe when several processes build at once: each writes a private file and renames it into place.

    Raises:
        BuildError: No compiler is found, or it fails.
    """
    compiler = _find_compiler()
    command = [*compiler, *_OPTIONS, *instructions.options]
    openmp = _openmp_arguments()
    version = _run([*compiler, "--version"]).stdout
    fingerprint = _fingerprint([*command, *openmp, version, describe_processor()])
    library = cache_directory() / f"octavo_kernels-{instructions.name}-{fingerprint}.so"
    if not library.exists():
        _compile(command, openmp, library)
    return library


def _find_compiler() -> list[str]:
    """Return the command of the C++ compiler: the CXX variable, else the first on the path."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise BuildError("no C++ compiler is on the path; install g++ or set CXX")


def _openmp_arguments() -> list[str]:
    """Return link arguments for the OpenMP runtime this process has loaded (torch's).

    A second runtime would bring a second pool of threads that fight for the same cores.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps}
    names = ("libgomp", "libiomp5", "libomp")
    runtimes = [path for path in sorted(mapped) if Path(path).name.startswith(names)]
    # The compiler appends its own runtime; --as-needed drops it when the first gives all symbols.
    return ["-Wl,--as-needed", *runtimes[:1]]


def cache_directory() -> Path:
    """Return a writable directory for compiled libraries, created if it is missing.

    Raises:
        BuildError: It cannot be made, or anyone can write to it: what lies there is run.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = Path(base) / "octavo" / "kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o022:
            directory.chmod(status.st_mode & ~0o022)
    except OSError as error:
        raise BuildError(f"the cache directory {directory} cannot be made ({error})") from error
    if directory.stat().st_mode & stat.S_IWOTH:
        raise BuildError(
            f"the cache directory {directory} can be written by anyone, and what lies there is run;"
            " name another with XDG_CACHE_HOME"
        )
    return directory


def _fingerprint(parts: list[str]) -> str:
    """Hash the sources and whatever else the machine code depends on."""
    digest = hashlib.sha256()
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_SOURCE_DIR / name).read_bytes())
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(command: list[str], openmp: list[str], library: Path) -> None:
    """Compile the sources side by side in a private directory, link them, and rename the result."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as directory:
        sources = [_SOURCE_DIR / name for name in _SOURCES]
        objects = [f"{directory}/{source.stem}.o" for source in sources]
        commands = [
            [*command, "-c", "-o", each, str(source)]
            for each, source in zip(objects, sources, strict=True)
        ]
        # The threads only wait, each for its own compiler.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run_compiler, commands))
        temporary = f"{directory}/{library.name}"
        _run_compiler([*command, "-shared", "-o", temporary, *objects, *openmp])
        with open(temporary, "rb") as built:
            os.fsync(built.fileno())
        os.replace(temporary, library)


def _run_compiler(command: list[str]) -> None:
    finished = _run(command)
    if finished.returncode != 0:
        raise BuildError(f"{command[0]} failed: {finished.stderr.strip()[-2000:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler cannot be run ({error})") from error
