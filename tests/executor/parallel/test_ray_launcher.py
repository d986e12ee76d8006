"""What a node of another folder is told of the checkpoint."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.executor.parallel.ray_launcher import with_absolute_model


def test_a_path_is_made_absolute_and_a_hub_id_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, hub = EngineConfig("models", block_size=32), EngineConfig("organisation/name")
    assert with_absolute_model(relative) == EngineConfig(str(tmp_path / "models"), block_size=32)
    assert with_absolute_model(hub) is hub
