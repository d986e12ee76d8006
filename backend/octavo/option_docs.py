"""What the engine's options are called, and what their own docstrings say of them."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import MISSING, fields

from octavo.config import EngineConfig


def option_docs() -> list[tuple[str, str, str]]:
    """Return (name, default, documentation) of every option, in order of definition."""
    body = ast.parse(inspect.getsource(EngineConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_doc = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_doc:
            docs[field.target.id] = str(text.value.value)  # type: ignore[attr-defined]
    return [
        (f.name, "required" if f.default is MISSING else json.dumps(f.default), docs[f.name])
        for f in fields(EngineConfig)
    ]


def option_table() -> str:
    """Return the options as a Markdown table."""
    rows = [f"| `{name}` | `{default}` | {text} |\n" for name, default, text in option_docs()]
    return "| option | default | meaning |\n|---|---|---|\n" + "".join(rows)
