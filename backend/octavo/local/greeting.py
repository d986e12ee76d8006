"""What `octavo serve` says once its server can be used: where, what is loaded, and how to try it.

Asks the server which models it has. Knows nothing of processes or terminals.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from pathlib import Path

from octavo.local.bundle import MODEL_NAME
from octavo.local.server_options import ServerOptions
from octavo.local.triton_server import TritonServer

PROMPT = "The capital of France is"
TIMEOUT_S = 5.0


def greeting(server: TritonServer, load_s: float) -> str:
    """Return the endpoints of a server that is ready after `load_s`, and commands to be copied."""
    is_loaded = _models(server)
    is_bare = bool(is_loaded) and not any(is_loaded.values())
    lines = [
        f"{'The server' if is_bare else 'Octavo'} is ready after {load_s:.1f} s"
        f"{', and no model is loaded' if is_bare else ''} (Ctrl-C stops it)",
        f"  HTTP     {server.http_url}",
        f"  gRPC     {server.grpc_url}",
        f"  metrics  {server.metrics_url}",
        *_exposure(server.options),
        *_absent(server, is_loaded),
    ]
    if is_loaded.get(MODEL_NAME):
        lines += _examples(server)
    return "\n".join(lines)


def _models(server: TritonServer) -> dict[str, bool]:
    """Return which models there are and whether each is loaded; none if nobody may know."""
    url, keys = f"{server.http_url}/v2/repository/index", server.options.http_keys
    request = urllib.request.Request(url, data=b"{}", headers=keys)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            models: list[dict[str, str]] = json.load(answer)
    except OSError:
        # A flag may restrict this part of the server's interface.
        return {}
    is_loaded = dict.fromkeys((model["name"] for model in models), False)
    # Each version has an entry of its own; a model that was never loaded has one without a state.
    loaded = (model["name"] for model in models if model.get("state") == "READY")
    return is_loaded | dict.fromkeys(loaded, True)


def _absent(server: TritonServer, is_loaded: dict[str, bool]) -> list[str]:
    """Return which models are not loaded, and how they would be."""
    absent = [name for name, is_there in is_loaded.items() if not is_there]
    if not absent:
        return []
    lines = ["", f"  not loaded: {', '.join(absent)}"]
    if server.options.control_mode == "explicit":
        lines.append(f"  curl -X POST {server.http_url}/v2/repository/models/{absent[0]}/load")
    return lines


def _examples(server: TritonServer) -> list[str]:
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 32}
    url = "" if server.grpc_url == "127.0.0.1:8001" else f" --url {server.grpc_url}"
    if server.options.is_encrypted:
        url += " --tls"
    return [
        "",
        f"  curl -N {server.http_url}/v2/models/{MODEL_NAME}/generate_stream "
        f"-d '{json.dumps(body)}'",
        f'  {_own_command()} generate{url} "{PROMPT}"',
    ]


def _exposure(options: ServerOptions) -> list[str]:
    """Return what follows from an address that other machines can reach."""
    if options.is_private:
        return []
    line = f"  listens on {options.host}: other machines can reach it"
    # A given repository decides by itself.
    return [line if options.repository else line + ", so octavo inspect is off"]


def _own_command() -> str:
    """Return how the user's shell finds the `octavo` command of this environment."""
    if shutil.which("octavo") is not None:
        return "octavo"
    command, here = Path(sys.executable).parent / "octavo", Path.cwd()
    return str(command.relative_to(here) if command.is_relative_to(here) else command)
