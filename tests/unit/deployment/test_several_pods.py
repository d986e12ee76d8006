"""Engines over several pods, and the way to replicas: files that agree with all else we say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from octavo.config import EngineConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes" / "several-pods"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
KUBECTL = Path(sys.executable).parent / "kubectl"
RELEASES = ("1.31", "1.37")
SETS = ("kuberay", "kuberay-gpu", "leaderworkerset", "leaderworkerset-gpu")

Objects = dict[str, dict[str, Any]]
STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
PARAMETERS = {"type": "object", "additionalProperties": STRING}


def exactly(**keys: Any) -> dict[str, Any]:
    """Return the schema of an object with these keys and no others."""
    return {
        "type": "object",
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


ROUTE = exactly(
    parentRefs={"type": "array", "items": exactly(name=STRING, sectionName=STRING)},
    rules={
        "type": "array",
        "items": exactly(backendRefs={"type": "array", "items": exactly(name=STRING, port=COUNT)}),
    },
)
#: What we use of resources that the checker has no schema for, and no more.
CUSTOM = {
    ("ray.io/v1", "RayCluster"): exactly(
        rayVersion=STRING,
        enableInTreeAutoscaling={"const": False},
        headGroupSpec=exactly(
            serviceType={"const": "ClusterIP"}, rayStartParams=PARAMETERS, template=TEMPLATE
        ),
        workerGroupSpecs={
            "type": "array",
            "items": exactly(
                groupName=STRING,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                rayStartParams=PARAMETERS,
                template=TEMPLATE,
            ),
        },
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): exactly(
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=exactly(
            size=COUNT,
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE,
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): ROUTE,
    ("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy"): exactly(
        targetRefs={"type": "array", "items": exactly(group=STRING, kind=STRING, name=STRING)},
        loadBalancer=exactly(
            type={"const": "ConsistentHash"},
            consistentHash=exactly(type={"const": "Header"}, header=exactly(name=STRING)),
        ),
    ),
}


def render(folder: Path) -> Objects:
    """Return what `kubectl apply -k` would send, by kind."""
    command = [str(KUBECTL), "kustomize", str(folder)]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {each["kind"]: each for each in yaml.load_all(made, yaml.CSafeLoader)}


@pytest.fixture(scope="module", params=SETS)
def objects(request: pytest.FixtureRequest) -> Objects:
    """Give the objects of one engine over several pods."""
    return render(FOLDER / request.param)


@pytest.fixture(scope="module")
def gateway() -> Objects:
    return render(ROOT / "deploy" / "kubernetes" / "gateway")


def templates(objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod templates of the server and of the other ranks."""
    if ray := objects.get("RayCluster"):
        (workers,) = ray["spec"]["workerGroupSpecs"]
        return ray["spec"]["headGroupSpec"]["template"], workers["template"]
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"], group["workerTemplate"]


def num_pods(objects: Objects) -> int:
    if ray := objects.get("RayCluster"):
        return 1 + sum(group["replicas"] for group in ray["spec"]["workerGroupSpecs"])
    size: int = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"]
    return size


def container(template: dict[str, Any]) -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = template["spec"]["containers"]
    return only


def script(template: dict[str, Any]) -> str:
    bash, flag, text = container(template)["args"]
    assert (bash, flag) == ("bash", "-c")
    return str(text)


@pytest.mark.parametrize("release", RELEASES)
def test_objects_are_valid(objects: Objects, gateway: Objects, release: str) -> None:
    for each in (*objects.values(), *gateway.values()):
        custom = CUSTOM.get((each["apiVersion"], each["kind"]))
        if custom is None:
            kubernetes_validate.validate(each, release, strict=True)
        else:
            jsonschema.validate(each["spec"], custom)


@pytest.mark.parametrize("release", RELEASES)
def test_pod_templates_are_valid(objects: Objects, release: str) -> None:
    for template in templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, release, strict=True)


def test_options_are_those_of_an_engine_with_a_stage_in_each_pod(objects: Objects) -> None:
    options = objects["ConfigMap"]["data"]
    own = {name: value for name, value in options.items() if name.startswith("OCTAVO_")}
    model = ROOT / "model_repository" / "octavo" / "1" / "engine.json"
    config = EngineConfig.load(model, {}, own)
    known = set(EngineConfig.__dataclass_fields__)
    assert {name.removeprefix("OCTAVO_").lower() for name in own} <= known
    assert config.distributed_executor_backend == "ray"
    assert config.num_ranks == config.pipeline_parallel_size == num_pods(objects)
    for template in templates(objects):
        resources = container(template)["resources"]
        assert resources["requests"] == resources["limits"]
        gpus = resources["limits"].get("nvidia.com/gpu", 0)
        assert gpus == {"cpu": 0, "cuda": config.num_ranks // num_pods(objects)}[config.device]
        tolerated = [each["key"] for each in template["spec"].get("tolerations", ())]
        assert tolerated == ["nvidia.com/gpu"] * gpus
        cpus = int(resources["limits"]["cpu"])
        assert cpus * num_pods(objects) == config.cpu_threads
        (source,) = container(template)["envFrom"]
        assert source["configMapRef"]["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_sets_with_gpus_differ_in_nothing_else() -> None:
    for name in ("kuberay", "leaderworkerset"):
        plain, with_gpus = render(FOLDER / name), render(FOLDER / f"{name}-gpu")
        options, own = plain["ConfigMap"]["data"], with_gpus["ConfigMap"]["data"]
        assert own == {
            key: "cuda" if key == "OCTAVO_DEVICE" else value
            for key, value in options.items()
            if key != "OCTAVO_KV_CACHE_MEMORY_BYTES"  # a share of the GPU instead
        }
        for template in templates(with_gpus):
            del template["spec"]["tolerations"]
            for asked in container(template)["resources"].values():
                del asked["nvidia.com/gpu"]
        assert {**with_gpus, "ConfigMap": plain["ConfigMap"]} == plain


def test_ray_has_the_cpus_of_each_pod(objects: Objects) -> None:
    server, rank = templates(objects)
    cpus = container(rank)["resources"]["limits"]["cpu"]
    if ray := objects.get("RayCluster"):
        groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
        assert {group["rayStartParams"]["num-cpus"] for group in groups} == {cpus}
        assert groups[1]["rayStartParams"]["node-manager-port"] == "10002"
        return
    for template in (server, rank):
        assert f"--num-cpus={cpus}" in script(template)
    assert "--node-manager-port=10002" in script(rank)


def test_image_and_server_are_those_of_compose(objects: Objects) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    service = compose["services"]["octavo"]
    assert service["image"].partition(":")[0] == "octavo"
    server, rank = templates(objects)
    assert {container(each)["image"] for each in (server, rank)} == {"octavo:latest"}
    command = "exec " + " ".join(service["command"])
    assert script(server).splitlines()[-1] == command


def test_ray_is_that_of_the_constraints(objects: Objects) -> None:
    pinned = re.search(
        r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned is not None
    if ray := objects.get("RayCluster"):
        assert ray["spec"]["rayVersion"] == pinned[1]


def test_the_server_is_probed_as_in_one_pod(objects: Objects, rendered: dict[str, Objects]) -> None:
    server, _ = templates(objects)
    (alone,) = rendered["cpu"]["Deployment"]["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(server)[probe] == alone[probe]
    assert container(server)["lifecycle"] == alone["lifecycle"]
    ports = {each["name"]: each["containerPort"] for each in container(server)["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002, "gcs": 6379}


def test_ranks_outlast_the_drain_of_their_server(objects: Objects) -> None:
    server, rank = templates(objects)
    pauses = [
        int(container(each)["lifecycle"]["preStop"]["exec"]["command"][1])
        for each in (server, rank)
    ]
    exit_s = int(re.findall(r"--exit-timeout-secs=(\d+)", script(server))[0])
    drain_s = float(objects["ConfigMap"]["data"]["OCTAVO_DRAIN_TIMEOUT_S"])
    grace_s = {each["spec"]["terminationGracePeriodSeconds"] for each in (server, rank)}
    assert drain_s < exit_s
    assert pauses[0] + exit_s < pauses[1] < min(grace_s)
    assert script(server).startswith("setsid "), "SIGTERM must not reach Ray before the server"


def test_pods_are_confined_as_all_others(objects: Objects, rendered: dict[str, Objects]) -> None:
    alone = rendered["cpu"]["Deployment"]["spec"]["template"]["spec"]
    for template in templates(objects):
        spec = template["spec"]
        assert spec["securityContext"] == alone["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        confined = alone["containers"][0]["securityContext"]
        assert container(template)["securityContext"] == confined


def test_clients_reach_the_server_alone_and_nobody_reaches_ray(objects: Objects) -> None:
    server, rank = templates(objects)
    roles = [each["metadata"]["labels"]["octavo-role"] for each in (server, rank)]
    assert roles == ["server", "rank"]
    assert objects["Service"]["spec"]["selector"] == {"octavo-role": "server"}
    ours = {"matchExpressions": [{"key": "octavo-role", "operator": "In", "values": roles}]}
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == ours
    open_to_all_ports = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
    assert open_to_all_ports == [[{"podSelector": ours}]]


def test_the_gateway_hashes_the_header_of_the_page(gateway: Objects) -> None:
    hashing = gateway["BackendTrafficPolicy"]["spec"]["loadBalancer"]["consistentHash"]
    assert f"`{hashing['header']['name']}`" in PAGE
    for kind, port in (("HTTPRoute", 8000), ("GRPCRoute", 8001)):
        ((rule,),) = [gateway[kind]["spec"]["rules"]]
        assert rule["backendRefs"] == [{"name": "octavo", "port": port}]


def test_the_page_names_what_there_is() -> None:
    named = {
        Path(name).name for name in re.findall(r"`deploy/kubernetes/several-pods/([\w-]+)`", PAGE)
    }
    assert named == set(SETS) == {path.name for path in FOLDER.iterdir()}
    known = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    metrics = set(re.findall(r"\b(?:octavo|nv_trt_llm)_[a-z_]+\b", PAGE)) - {"octavo_client"}
    assert len(metrics) > 7
    assert {name for name in metrics if f"`{name}`" not in known} == set()
    extras = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert f"--build-arg EXTRAS={extras[0]},ray " in PAGE
