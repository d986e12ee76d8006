"""Compose file and Dockerfile are valid and keep their promises; no container is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig

ROOT = Path(__file__).parents[3]
TOOLS = Path(sys.executable).parent
SERVICES = ("octavo", "octavo-cpu")
MONITORS = ("prometheus", "grafana")


def compose(*arguments: str, **variables: str) -> str:
    """Run compose on the file, without any engine and without the caller's own variables."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    profiles = ["--profile", "cpu", "--profile", "monitoring"]
    return subprocess.run(
        [str(TOOLS / "docker-compose"), "--file", "docker-compose.yml", *profiles, *arguments],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = json.loads(compose("config", "--format", "json"))
    return loaded["services"]


def seconds(duration: str) -> int:
    minutes, rest = re.fullmatch(r"(?:(\d+)m)?(\d+)s", duration).groups()  # type: ignore[union-attr]
    return 60 * int(minutes or 0) + int(rest)


def test_compose_file_is_valid() -> None:
    compose("config", "--quiet")


def test_dockerfile_passes_the_linter() -> None:
    subprocess.run([str(TOOLS / "hadolint"), "Dockerfile"], cwd=ROOT, check=True)


def test_image_is_built_on_nvidias_unless_another_is_named() -> None:
    default = json.loads(compose("config", "--format", "json"))
    other = json.loads(compose("config", "--format", "json", TRITON_IMAGE="example/triton:1"))
    for name in SERVICES:
        base = default["services"][name]["build"]["args"]["TRITON_IMAGE"]
        assert base == "nvcr.io/nvidia/tritonserver:26.07-py3"
        assert other["services"][name]["build"]["args"]["TRITON_IMAGE"] == "example/triton:1"
    assert f"ARG TRITON_IMAGE={base}\nFROM ${{TRITON_IMAGE}}\n" in (ROOT / "Dockerfile").read_text()


def test_a_gpu_is_reserved_for_the_default_service_alone(
    services: dict[str, dict[str, Any]],
) -> None:
    (device,) = services["octavo"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert services["octavo"]["environment"]["OCTAVO_DEVICE"] == "cuda"
    assert "profiles" not in services["octavo"]
    assert "deploy" not in services["octavo-cpu"]
    assert services["octavo-cpu"]["environment"]["OCTAVO_DEVICE"] == "cpu"
    assert services["octavo-cpu"]["profiles"] == ["cpu"]


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_memory_limits_health_check_and_an_ordinary_user(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    assert int(service["shm_size"]) == 1 << 30
    assert service["ulimits"] == {"memlock": -1, "stack": 64 << 20}
    assert service["user"] == "1000:1000"
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][:4] == ["CMD", "octavo", "health", "--ready"]
    assert service["command"][:4] == ["octavo", "watch", "--", "tritonserver"]
    assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}


@pytest.mark.parametrize("name", SERVICES)
def test_service_mounts_models_read_only_and_a_cache(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    mounts = {mount["target"]: mount for mount in services[name]["volumes"]}
    assert mounts["/models"]["source"] == str(ROOT / "model_repository")
    assert mounts["/models"]["read_only"]
    assert mounts["/checkpoints"]["read_only"]
    assert mounts["/var/cache/octavo"]["type"] == "volume"


@pytest.mark.parametrize("name", SERVICES)
def test_drain_fits_in_the_servers_exit_and_that_in_the_containers_stop(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    (exit_flag,) = (flag for flag in service["command"] if "exit-timeout" in flag)
    drain_s = float(service["environment"]["OCTAVO_DRAIN_TIMEOUT_S"])
    assert drain_s < int(exit_flag.partition("=")[2]) < seconds(service["stop_grace_period"])


def test_mounted_repository_has_valid_engine_options() -> None:
    model = ROOT / "model_repository" / "octavo"
    assert 'backend: "octavo"' in (model / "config.pbtxt").read_text()
    config = EngineConfig.load(model / "1" / "engine.json", {}, {"OCTAVO_DEVICE": "cpu"})
    assert config.device == "cpu"


def test_everything_the_dockerfile_copies_exists_and_reaches_the_build() -> None:
    copies = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if f"!{source}" not in allowed] == []


@pytest.mark.parametrize("name", SERVICES)
def test_sigterm_goes_to_the_whole_process_group(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    entry = 'ENTRYPOINT ["/usr/bin/tini", "-g", "--", "/opt/nvidia/nvidia_entrypoint.sh"]'
    assert f"\n{entry}\n" in (ROOT / "Dockerfile").read_text()
    # An init process of Docker's own would stand before the image's and pass on less.
    assert "init" not in services[name]
    assert services[name]["entrypoint"] is None


def test_monitoring_starts_only_when_asked_for(services: dict[str, dict[str, Any]]) -> None:
    asked = {name for name, each in services.items() if each.get("profiles") == ["monitoring"]}
    assert asked == set(MONITORS)


@pytest.mark.parametrize("name", MONITORS)
def test_monitors_are_pinned_confined_and_watched(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}
    assert service["healthcheck"]["test"][:2] == ["CMD", "wget"]


@pytest.mark.parametrize("name", MONITORS)
def test_monitors_read_the_deployments_files_and_write_to_one_volume(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    mounts = services[name]["volumes"]
    (volume,) = (mount for mount in mounts if mount["type"] == "volume")
    bound = [mount for mount in mounts if mount["type"] == "bind"]
    assert volume["source"] == name
    assert all(mount["read_only"] for mount in bound)
    assert [mount["source"] for mount in bound if not Path(mount["source"]).is_dir()] == []


def test_paths_in_the_monitors_files_are_where_compose_mounts_them(
    services: dict[str, dict[str, Any]],
) -> None:
    monitoring = ROOT / "deploy" / "monitoring"
    mounts = {
        mount["target"]: mount["source"] for name in MONITORS for mount in services[name]["volumes"]
    }
    assert mounts["/etc/prometheus"] == str(monitoring / "prometheus")
    assert mounts["/etc/grafana/provisioning"] == str(monitoring / "grafana" / "provisioning")
    assert mounts["/etc/grafana/dashboards"] == str(monitoring / "grafana" / "dashboards")


def test_nobody_can_log_in_to_grafana_with_the_images_first_password(
    services: dict[str, dict[str, Any]],
) -> None:
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
