"""Prometheus' rules and Grafana's dashboard are valid, and speak of metrics that exist.

Neither program is run. `promtool` is asked besides, where it is on the path.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from octavo.config import EngineConfig

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "prometheus" / "octavo.rules.yml"
UNIT_TESTS = RULES.with_suffix(".test.yml")
DASHBOARD = MONITORING / "grafana" / "dashboards" / "octavo.json"
PROMTOOL = shutil.which("promtool")

#: Metrics of the Triton server itself that the files may use; Octavo does not make them, so no
#: document of ours lists them. Those of GPUs are there only on a machine that has one.
TRITONS_OWN = {
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_cpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_utilization",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
}
#: Made by Prometheus for each target.
PROMETHEUS_OWN = {"up"}


def documented_metrics() -> set[str]:
    """Return the series that docs/metrics.md promises: a histogram has three."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for name, kind in re.findall(r"^\| `(octavo_\w+)` \| (\w+) \|", text, re.MULTILINE):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names.update(name + suffix for suffix in suffixes)
    return names


def selected(expression: str) -> set[str]:
    """Return the names of the metrics an expression asks for; raise if it is no PromQL."""
    names: set[str] = set()

    def note(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, f"a selector without a name in {expression}"
            names.add(node.name)
        return True

    promql_parser.walk(promql_parser.parse(expression), note)
    return names


def filled_in(expression: str) -> str:
    """Return a panel's expression with values for Grafana's variables."""
    values = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, f"unknown variable in {expression}"
    return expression


def plotted(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the expression of each target and annotation."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], filled_in(target["expr"])
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], filled_in(annotation["expr"])


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if "alert" in rule]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def test_each_rule_has_the_fields_of_its_kind_and_no_other(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        if "record" in rule:
            assert set(rule) == {"record", "expr"}
            assert re.fullmatch(r"model:octavo_\w+:\w+", rule["record"])
        else:
            assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}


def test_rules_ask_for_metrics_that_exist(rules: list[dict[str, Any]]) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    known = documented_metrics() | recorded | PROMETHEUS_OWN
    unknown = {rule["expr"]: selected(rule["expr"]) - known for rule in rules}
    assert {expr: names for expr, names in unknown.items() if names} == {}


def test_alerts_cover_what_an_operator_is_woken_for(alerts: list[dict[str, Any]]) -> None:
    assert {rule["alert"]: rule["labels"]["severity"] for rule in alerts} == {
        "OctavoAbsent": "critical",
        "OctavoTargetDown": "critical",
        "OctavoEngineDown": "critical",
        "OctavoEngineRestarted": "warning",
        "OctavoEngineRestartLoop": "critical",
        "OctavoEngineStalled": "critical",
        "OctavoRequestsWaiting": "warning",
        "OctavoKvCacheFull": "warning",
        "OctavoPreemptionStorm": "warning",
        "OctavoRejectingRequests": "warning",
        "OctavoWrongRequests": "info",
        "OctavoSlowFirstToken": "warning",
        "OctavoSlowTokens": "warning",
        "OctavoInternalErrors": "critical",
    }


def test_each_alert_says_what_happened_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "\n" not in rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"].split()) >= 20


def test_each_alert_has_a_unit_test(alerts: list[dict[str, Any]]) -> None:
    tests = UNIT_TESTS.read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts if rule["alert"] not in tests] == []


def test_options_that_the_alerts_advise_on_exist(alerts: list[dict[str, Any]]) -> None:
    text = " ".join(rule["annotations"]["description"] for rule in alerts)
    named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text))
    others = {"octavo_admission_rejections_total", "octavo_num_requests_waiting", "engine_down"}
    assert named - set(EngineConfig.__dataclass_fields__) == others


def test_prometheus_scrapes_the_job_that_the_rules_look_for(rules: list[dict[str, Any]]) -> None:
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["/etc/prometheus/octavo.rules.yml"]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert set(jobs) == {"octavo", "prometheus"}
    (lookup,) = jobs["octavo"]["dns_sd_configs"]
    assert (lookup["names"], lookup["port"]) == (["octavo", "octavo-cpu"], 8002)
    asked = re.findall(r'job="(\w+)"', " ".join(rule["expr"] for rule in rules))
    assert set(asked) == {"octavo"}


def test_operator_has_the_same_rules_as_prometheus() -> None:
    made = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text(encoding="utf-8"))
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert made["spec"] == rules, "run deploy/monitoring/update-rules"


def test_dashboard_asks_for_metrics_that_exist(dashboard: dict[str, Any]) -> None:
    known = documented_metrics() | TRITONS_OWN
    unknown = {title: selected(expr) - known for title, expr in plotted(dashboard)}
    assert {title: names for title, names in unknown.items() if names} == {}


def test_dashboard_shows_every_metric_of_the_engine(dashboard: dict[str, Any]) -> None:
    shown = set().union(*(selected(expr) for _, expr in plotted(dashboard)))
    promised = {name for name in documented_metrics() if not name.endswith(("_sum", "_count"))}
    assert promised - shown == set()


def test_dashboard_uses_no_data_source_but_the_one_chosen(dashboard: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    users = [
        *(panel for panel in dashboard["panels"] if panel["type"] != "row"),
        *(target for panel in dashboard["panels"] for target in panel.get("targets", [])),
        *(each for name, each in variables.items() if name != "datasource"),
        *dashboard["annotations"]["list"],
    ]
    assert [user for user in users if user["datasource"] != chosen] == []


def test_panels_have_names_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        left, top, width, height = (panel["gridPos"][side] for side in "xywh")
        cells = {(left + x, top + y) for x in range(width) for y in range(height)}
        assert left + width <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_panel_has_a_description_and_targets_apart(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            names = [target["refId"] for target in panel["targets"]]
            assert names == list("ABC"[: len(names)])
            assert names
            assert panel["description"]


def test_rows_are_those_that_an_operator_reads_from_top_to_bottom(
    dashboard: dict[str, Any],
) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    first, last = ["Now", "Traffic", "Latency", "Tokens and steps"], ["Engine and host"]
    assert rows == [*first, "KV cache", "Adapters (LoRA)", *last]


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    provisioning = MONITORING / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    providers = yaml.safe_load((provisioning / "dashboards" / "octavo.yml").read_text())
    (provider,) = providers["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"


@pytest.mark.skipif(PROMTOOL is None, reason="beside the tests above, which need no promtool")
@pytest.mark.parametrize("what", [["check", "rules", RULES], ["test", "rules", UNIT_TESTS]])
def test_promtool_agrees(what: list[str]) -> None:
    done = subprocess.run([str(PROMTOOL), *what], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
