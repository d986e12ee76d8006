"""The autoscalers go by figures of the engine, and can get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import promql_parser
import yaml

ADAPTER = Path(__file__).parents[3] / "deploy" / "kubernetes" / "prometheus-adapter.yaml"

Objects = dict[str, dict[str, Any]]


def test_both_autoscalers_go_by_waiting_requests_and_kv_use_at_one_pace(
    rendered: dict[str, Objects],
) -> None:
    scaler = rendered["gpu"]["HorizontalPodAutoscaler"]["spec"]
    keda = rendered["gpu-keda"]["ScaledObject"]["spec"]
    targets = {
        each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"]
        for each in scaler["metrics"]
    }
    assert targets == {"octavo_num_requests_waiting": "4", "octavo_kv_cache_usage_ratio": "750m"}
    waiting, use = (each["metadata"] for each in keda["triggers"])
    assert ("octavo_num_requests_waiting" in waiting["query"], waiting["threshold"]) == (True, "4")
    assert ("octavo_kv_cache_usage_ratio" in use["query"], use["threshold"]) == (True, "0.75")
    behavior = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == scaler["behavior"]
    replicas = (scaler["minReplicas"], scaler["maxReplicas"])
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == replicas


def test_scaling_in_waits_for_more_than_one_pods_drain(rendered: dict[str, Objects]) -> None:
    behavior = rendered["gpu"]["HorizontalPodAutoscaler"]["spec"]["behavior"]["scaleDown"]
    pod = rendered["gpu"]["Deployment"]["spec"]["template"]["spec"]
    (policy,) = behavior["policies"]
    assert policy["value"] == 1
    assert policy["periodSeconds"] > pod["terminationGracePeriodSeconds"]


def test_the_adapter_offers_what_the_autoscaler_asks_for(rendered: dict[str, Objects]) -> None:
    rules = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]["custom"]
    offered = {rule["name"]["matches"]: rule for rule in rules}
    wanted = rendered["gpu"]["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert {each["pods"]["metric"]["name"] for each in wanted} == set(offered)
    for name, rule in offered.items():
        assert rule["seriesQuery"].startswith(name)
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
        query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        promql_parser.parse(query.replace("<<.LabelMatchers>>", 'pod="a"'))


def test_kedas_queries_are_promql(rendered: dict[str, Objects]) -> None:
    for trigger in rendered["gpu-keda"]["ScaledObject"]["spec"]["triggers"]:
        promql_parser.parse(trigger["metadata"]["query"])


def test_more_may_wait_than_the_autoscaler_bears(rendered: dict[str, Objects]) -> None:
    limit = rendered["gpu"]["ConfigMap"]["data"]["OCTAVO_MAX_NUM_QUEUED_REQUESTS"]
    assert int(limit) > 4
