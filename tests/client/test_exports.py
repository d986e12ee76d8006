import subprocess
import sys

import octavo_client


def test_the_public_names_are_these():
    assert octavo_client.__all__ == [
        "Answer",
        "AsyncClient",
        "AsyncDeltaStream",
        "Client",
        "Completion",
        "Delta",
        "DeltaStream",
        "EngineHealth",
        "InvalidRequest",
        "ModelNotFound",
        "OctavoClientError",
        "RequestCancelled",
        "RequestTimeout",
        "ServerError",
        "Timing",
        "TokenLogprob",
        "Unavailable",
        "tls_credentials",
    ]
    assert all(hasattr(octavo_client, name) for name in octavo_client.__all__)


def test_the_client_and_its_commands_import_neither_torch_nor_the_server_side():
    code = (
        "import sys, octavo_client.cli;"
        "print({'torch', 'octavo', 'octavo_kernels'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
