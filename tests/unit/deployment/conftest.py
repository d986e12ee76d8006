"""What kubectl makes of the Kubernetes files, once for all tests; no cluster is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

OVERLAYS = Path(__file__).parents[3] / "deploy" / "kubernetes" / "overlays"
KUBECTL = Path(sys.executable).parent / "kubectl"

Objects = dict[str, dict[str, Any]]


def render(overlay: str) -> Objects:
    """Return what `kubectl apply -k` would send, by kind; the dashboard's map as `Dashboard`."""
    made = subprocess.run(
        [str(KUBECTL), "kustomize", str(OVERLAYS / overlay)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    objects: Objects = {}
    for each in yaml.load_all(made, yaml.CSafeLoader):
        is_dashboard = each["metadata"]["name"] == "octavo-dashboard"
        kind = "Dashboard" if is_dashboard else each["kind"]
        assert kind not in objects
        objects[kind] = each
    return objects


@pytest.fixture(scope="session")
def rendered() -> dict[str, Objects]:
    """Return the objects by kind, by overlay."""
    return {overlay: render(overlay) for overlay in ("cpu", "gpu", "gpu-keda")}


@pytest.fixture(params=["cpu", "gpu", "gpu-keda"])
def objects(request: pytest.FixtureRequest, rendered: dict[str, Objects]) -> Objects:
    """Return the objects of one overlay by kind; a test runs for each."""
    return rendered[request.param]


@pytest.fixture
def pod(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any]
    (spec,) = pod["containers"]
    return spec
