from __future__ import annotations

from octavo.triton_model.stray_variables import stray_variables


def test_a_misspelt_variable_is_told_with_the_nearest_option() -> None:
    environment = {"OCTAVO_MAX_NUM_SEQ": "8", "OCTAVO_GADGET": "1"}
    assert list(stray_variables(environment)) == [
        "variable OCTAVO_GADGET sets no engine option and is ignored",
        "variable OCTAVO_MAX_NUM_SEQ sets no engine option and is ignored; "
        "did you mean OCTAVO_MAX_NUM_SEQS?",
    ]


def test_variables_of_options_commands_and_others_are_nobodys_mistake() -> None:
    names = """
        PATH OCTAVO_MODEL OCTAVO_MAX_NUM_SEQS OCTAVO_QUANTIZATION OCTAVO_KERNELS OCTAVO_PYTHON
        OCTAVO_RUNTIME OCTAVO_SERVE_HTTP_PORT OCTAVO_HEALTH_URL OCTAVO_WATCH_MODEL
        OCTAVO_SERVICE_HOST OCTAVO_SERVICE_PORT_GRPC OCTAVO_PORT OCTAVO_PORT_8001_TCP_ADDR
        OCTAVO_METRICS_SERVICE_HOST OCTAVO_METRICS_PORT_8002_TCP_PROTO
    """
    assert list(stray_variables(dict.fromkeys(names.split(), "1"))) == []
