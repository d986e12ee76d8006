"""What each kind of device is given its work with."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from octavo.executor.device_inputs import HostInputs, StepSizes
from octavo.executor.device_tools import make_device_tools


def test_on_a_cpu_nothing_is_staged_recorded_or_planned_ahead():
    device = torch.device("cpu")
    model = SimpleNamespace(recordable=True)
    tools = make_device_tools(device, model, StepSizes(4, 16, 64, 8))
    assert isinstance(tools.inputs, HostInputs)
    assert tools.make_graphs is None
    assert tools.steps_ahead == 0
