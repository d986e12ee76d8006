"""The Kubernetes files are all used, and what kubectl makes of them is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
MONITORING = ROOT / "deploy" / "monitoring"
#: The oldest and the newest release that the files are held to.
RELEASES = ("1.31", "1.37")

Objects = dict[str, dict[str, Any]]
STRING, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}
DURATION = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}
STRINGS = {"type": "object", "additionalProperties": STRING}


def exactly(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of an object with these keys and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def some(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list of such things that is not empty."""
    return {"type": "array", "minItems": 1, "items": schema}


RULE = exactly(
    {"expr": STRING},
    {"alert": STRING, "record": STRING, "for": DURATION, "labels": STRINGS, "annotations": STRINGS},
)
ENDPOINT = exactly(
    {"port": STRING}, {"path": STRING, "interval": DURATION, "scrapeTimeout": DURATION}
)
TRIGGER = exactly(
    {
        "type": {"const": "prometheus"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        "metadata": exactly({"serverAddress": STRING, "query": STRING, "threshold": STRING}),
    }
)
#: The checker has no schema for custom resources: here is what we use of theirs, and no more.
CUSTOM = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): exactly(
        {"selector": exactly({"matchLabels": STRINGS}), "endpoints": some(ENDPOINT)},
        {"jobLabel": STRING},
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): exactly(
        {"groups": some(exactly({"name": STRING, "rules": some(RULE)}, {"interval": DURATION}))}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): exactly(
        {"scaleTargetRef": exactly({"name": STRING}), "triggers": some(TRIGGER)},
        {
            "minReplicaCount": WHOLE,
            "maxReplicaCount": WHOLE,
            "pollingInterval": WHOLE,
            "fallback": exactly(
                {"failureThreshold": WHOLE, "replicas": WHOLE}, {"behavior": STRING}
            ),
            "advanced": exactly(
                {"horizontalPodAutoscalerConfig": exactly({"behavior": {"type": "object"}})}
            ),
        },
    ),
}


def test_overlays_hold_what_their_clusters_know(rendered: dict[str, Objects]) -> None:
    plain = {"Namespace", "ConfigMap", "Service", "Deployment", "PodDisruptionBudget"}
    plain |= {"NetworkPolicy"}
    watched = plain | {"ServiceMonitor", "PrometheusRule", "Dashboard"}
    assert {name: set(objects) for name, objects in rendered.items()} == {
        "cpu": plain,
        "gpu": watched | {"HorizontalPodAutoscaler"},
        "gpu-keda": watched | {"ScaledObject", "PersistentVolumeClaim"},
    }


@pytest.mark.parametrize("release", RELEASES)
def test_objects_are_valid(objects: Objects, release: str) -> None:
    for each in objects.values():
        custom = CUSTOM.get((each["apiVersion"], each["kind"]))
        if custom is None:
            kubernetes_validate.validate(each, release, strict=True)
        else:
            jsonschema.validate(each["spec"], custom)


@pytest.mark.parametrize("folder", [KUBERNETES, MONITORING])
def test_every_manifest_is_listed_once_in_its_kustomization(folder: Path) -> None:
    for kustomization in folder.rglob("kustomization.yaml"):
        content = yaml.safe_load(kustomization.read_text(encoding="utf-8"))
        listed = [name for name in content.get("resources", []) if not name.startswith("..")]
        listed += [each["path"] for each in content.get("patches", []) if "path" in each]
        there = {path.name for path in kustomization.parent.glob("*.yaml")}
        assert sorted(listed) == sorted(there - {"kustomization.yaml"}), kustomization


def test_every_overlay_is_rendered_and_every_component_is_used(
    rendered: dict[str, Objects],
) -> None:
    overlays = list((KUBERNETES / "overlays").iterdir())
    assert {overlay.name for overlay in overlays} == set(rendered)
    used = set()
    for folder in overlays:
        content = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        named = [*content["resources"], *content.get("components", [])]
        used |= {(folder / name).resolve() for name in named}
    components = set((KUBERNETES / "components").iterdir())
    assert used == components | {KUBERNETES / "base", KUBERNETES / "namespace", MONITORING}


def test_selectors_meet_the_labels_of_the_pods(objects: Objects) -> None:
    label = {"app.kubernetes.io/name": "octavo"}
    assert objects["Deployment"]["spec"]["template"]["metadata"]["labels"] == label
    assert objects["Deployment"]["spec"]["selector"] == {"matchLabels": label}
    assert objects["Service"]["spec"]["selector"] == label
    assert objects["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": label}
    assert objects["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": label}


def test_operator_finds_the_service_and_names_the_job_as_the_rules_do(
    rendered: dict[str, Objects],
) -> None:
    for objects in (rendered["gpu"], rendered["gpu-keda"]):
        monitor = objects["ServiceMonitor"]["spec"]
        labels = objects["Service"]["metadata"]["labels"]
        assert monitor["selector"] == {"matchLabels": labels}
        assert labels[monitor["jobLabel"]] == "octavo"


def test_named_ports_exist(objects: Objects, container: dict[str, Any]) -> None:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    service = {each["name"]: each["targetPort"] for each in objects["Service"]["spec"]["ports"]}
    assert service == {name: name for name in ports}
    opened = [
        port["port"]
        for rule in objects["NetworkPolicy"]["spec"]["ingress"]
        for port in rule["ports"]
    ]
    assert sorted(opened) == sorted(ports)


def test_cluster_gets_the_rules_and_the_dashboard_of_compose(
    rendered: dict[str, Objects],
) -> None:
    rules = (MONITORING / "prometheus" / "octavo.rules.yml").read_text(encoding="utf-8")
    dashboard = MONITORING / "grafana" / "dashboards" / "octavo.json"
    for name in ("gpu", "gpu-keda"):
        assert rendered[name]["PrometheusRule"]["spec"] == yaml.safe_load(rules)
        assert rendered[name]["Dashboard"]["data"] == {
            "octavo.json": dashboard.read_text(encoding="utf-8")
        }
