"""What the pods promise: options, confinement, probes, drains, network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from octavo.config import EngineConfig

ROOT = Path(__file__).parents[3]

Objects = dict[str, dict[str, Any]]


def containers(rendered: dict[str, Objects]) -> dict[str, dict[str, Any]]:
    """Return the one container of each overlay."""
    pods = {name: each["Deployment"]["spec"]["template"] for name, each in rendered.items()}
    return {name: pod["spec"]["containers"][0] for name, pod in pods.items()}


def test_options_are_options_of_the_engine(objects: Objects, container: dict[str, Any]) -> None:
    options = objects["ConfigMap"]["data"]
    names = {name.removeprefix("OCTAVO_").lower() for name in options}
    assert names - set(EngineConfig.__dataclass_fields__) == set()
    model = ROOT / "model_repository" / "octavo" / "1" / "engine.json"
    assert EngineConfig.load(model, {}, options).max_num_queued_requests == 64
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_a_change_of_options_rolls_the_pods(objects: Objects) -> None:
    assert objects["ConfigMap"]["metadata"]["name"].startswith("octavo-options-")


def test_no_variable_of_a_service_looks_like_an_option(pod: dict[str, Any]) -> None:
    assert pod["enableServiceLinks"] is False


def test_the_device_is_what_the_overlay_is_for(rendered: dict[str, Objects]) -> None:
    for name, container in containers(rendered).items():
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        device = rendered[name]["ConfigMap"]["data"]["OCTAVO_DEVICE"]
        assert (device, gpus) == (("cpu", None) if name == "cpu" else ("cuda", 1))


def test_cpu_threads_are_the_cpus_of_the_pod(rendered: dict[str, Objects]) -> None:
    resources = containers(rendered)["cpu"]["resources"]
    assert resources["requests"] == resources["limits"]
    threads = rendered["cpu"]["ConfigMap"]["data"]["OCTAVO_CPU_THREADS"]
    assert resources["limits"]["cpu"] == threads


def test_memory_that_the_engine_takes_is_set_and_fits_in_the_pods(
    rendered: dict[str, Objects],
) -> None:
    for name, container in containers(rendered).items():
        options = rendered[name]["ConfigMap"]["data"]
        limit = container["resources"]["limits"]["memory"]
        assert limit.endswith("Gi")
        taken = int(options["OCTAVO_SWAP_SPACE_BYTES"]) + (1 << 30)
        if name == "cpu":
            taken += int(options["OCTAVO_KV_CACHE_MEMORY_BYTES"])
        assert taken <= (int(limit.removesuffix("Gi")) << 30) // 2


def test_container_is_confined(
    objects: Objects, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    labels = objects["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_what_is_written_to_is_mounted(pod: dict[str, Any], container: dict[str, Any]) -> None:
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert set(mounts) == {"/dev/shm", "/tmp", "/var/cache/octavo"}
    assert set(mounts.values()) == set(volumes)
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_a_shared_cache_takes_the_place_of_the_pods_own(rendered: dict[str, Objects]) -> None:
    objects = rendered["gpu-keda"]
    claim = objects["PersistentVolumeClaim"]
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
    named = {"claimName": claim["metadata"]["name"]}
    assert {"name": "cache", "persistentVolumeClaim": named} in volumes
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_drain_fits_in_the_servers_exit_and_that_in_the_pods_end(
    objects: Objects, pod: dict[str, Any], container: dict[str, Any]
) -> None:
    sleep, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    (exit_flag,) = (flag for flag in container["args"] if "exit-timeout" in flag)
    exit_s = int(exit_flag.partition("=")[2])
    assert sleep == "sleep"
    assert float(objects["ConfigMap"]["data"]["OCTAVO_DRAIN_TIMEOUT_S"]) < exit_s
    assert int(pause_s) + exit_s < pod["terminationGracePeriodSeconds"]


def test_drain_and_exit_are_those_of_compose(objects: Objects, container: dict[str, Any]) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    service = compose["services"]["octavo"]
    assert container["args"] == service["command"]
    drain = service["environment"]["OCTAVO_DRAIN_TIMEOUT_S"]
    assert objects["ConfigMap"]["data"]["OCTAVO_DRAIN_TIMEOUT_S"] == drain


def test_sigterm_reaches_the_engine_by_the_images_own_entry_point(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert "command" not in container
    assert "shareProcessNamespace" not in pod


def test_a_rollout_never_takes_a_pod_before_another_is_ready(objects: Objects) -> None:
    strategy = objects["Deployment"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert "replicas" not in objects["Deployment"]["spec"]


def test_probes_wait_for_loading_and_prove_life_by_a_token(container: dict[str, Any]) -> None:
    startup, live = container["startupProbe"], container["livenessProbe"]
    assert startup["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600
    assert container["readinessProbe"]["httpGet"] == startup["httpGet"]
    assert live["exec"]["command"][:3] == ["octavo", "health", "--live"]
    limit_s = int(live["exec"]["command"][-1])
    assert limit_s < live["timeoutSeconds"] <= live["periodSeconds"]


def test_network_is_open_to_clients_and_prometheus_alone(objects: Objects) -> None:
    policy = objects["NetworkPolicy"]["spec"]
    client = {"matchLabels": {"octavo-client": "true"}}
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["from"] for rule in policy["ingress"]] == [
        [{"podSelector": client}, {"namespaceSelector": client}],
        [{"namespaceSelector": prometheus}],
    ]
