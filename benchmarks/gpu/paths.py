"""Where this checkout's packages lie, for machines on which none of them is installed."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = [str(ROOT / folder) for folder in ("benchmarks", "kernels", "backend")]
