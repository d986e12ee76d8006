"""What a node of another folder is told of the checkpoint and its adapters."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.executor.parallel.ray_launcher import with_absolute_paths


def test_paths_are_made_absolute_and_a_hub_id_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    relative = EngineConfig("models", multi_lora="adapters.json", block_size=32)
    assert with_absolute_paths(relative) == EngineConfig(
        str(tmp_path / "models"), multi_lora=str(tmp_path / "adapters.json"), block_size=32
    )
    hub = EngineConfig("organisation/name")
    assert with_absolute_paths(hub) == hub


def test_a_link_which_other_nodes_may_have_lead_elsewhere_is_left_alone(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "models"
    link.symlink_to("disk")
    assert with_absolute_paths(EngineConfig(str(link))).model == str(link)
