"""docs/deployment.md speaks of the files as they are, and its example works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
KUBECTL = Path(sys.executable).parent / "kubectl"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")

Objects = dict[str, dict[str, Any]]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `heading`, without its head."""
    lines = PAGE[PAGE.index(f"\n| {heading} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_alerts_of_the_table_are_those_of_the_rules() -> None:
    rules = ROOT / "deploy" / "monitoring" / "prometheus" / "octavo.rules.yml"
    groups = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    made = {(f"`{rule['alert']}`", rule["labels"]["severity"]) for rule in alerts}
    assert {(name, severity) for name, severity, _ in rows("alert")} == made


def test_the_variables_of_the_table_are_those_of_compose() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    read = set(re.findall(r"\$\{(\w+):-", compose))
    named = {name for cells in rows("variable") for name in re.findall(r"`(\w+)`", cells[0])}
    assert named == read


def test_the_overlays_of_the_table_exist(rendered: dict[str, Objects]) -> None:
    named = [Path(cells[0].strip("`")) for cells in rows("overlay")]
    assert {path.name for path in named} == set(rendered)
    assert all((ROOT / path / "kustomization.yaml").exists() for path in named)


def test_the_files_of_the_table_exist() -> None:
    monitoring = ROOT / "deploy" / "monitoring"
    assert [row for row in rows("file") if not (monitoring / row[0].strip("`")).exists()] == []


def test_the_targets_of_the_table_are_those_of_the_autoscaler(
    rendered: dict[str, Objects],
) -> None:
    metrics = rendered["gpu"]["HorizontalPodAutoscaler"]["spec"]["metrics"]
    named = {name.strip("`"): float(target) for name, target, _ in rows("figure")}
    milli = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in metrics}
    values = {name: target["averageValue"] for name, target in milli.items()}
    assert values == {"octavo_num_requests_waiting": "4", "octavo_kv_cache_usage_ratio": "750m"}
    assert named == {"octavo_num_requests_waiting": 4, "octavo_kv_cache_usage_ratio": 0.75}


def test_the_overlay_of_the_example_renders(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
    here = os.path.relpath(ROOT, tmp_path.resolve())
    local = example.replace("github.com/you/octavo", here)
    (tmp_path / "kustomization.yaml").write_text(local, encoding="utf-8")
    made = subprocess.run(
        [str(KUBECTL), "kustomize", str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout
    objects = {each["kind"]: each for each in yaml.safe_load_all(made)}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/octavo:0.1.0"
    assert objects["ConfigMap"]["data"]["OCTAVO_MAX_MODEL_LEN"] == "16384"
