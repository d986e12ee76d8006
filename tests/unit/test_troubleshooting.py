"""What docs/troubleshooting.md quotes is what our code or the server says, word for word."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = re.findall(r"^```(octavo|triton|tritonclient)\n(.*?)^```$", PAGE, re.M | re.S)
#: Shorter pieces between two `…` are found in anything.
LEAST = 6


@cache
def our_texts() -> str:
    """Return every string in our code, with `…` for what f-strings put in, one a line."""
    files = [file for folder in ("backend", "client") for file in (ROOT / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    plain = [node.value for node in nodes if isinstance(node, ast.Constant)]
    joined = [_template(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    return "\n".join(text for text in (*plain, *joined) if isinstance(text, str))


def _template(node: ast.JoinedStr) -> str:
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
    )


@cache
def their_texts(package: str, *names: str) -> bytes:
    """Return the files of a package, programs and all, as they are."""
    folder = Path(str(pytest.importorskip(package).__file__)).parent
    found = {file for name in names for file in folder.glob(name) if file.is_file()}
    return b"\n".join(file.read_bytes() for file in sorted(found))


def is_said(by: str, piece: str) -> bool:
    if by == "octavo":
        return piece in our_texts()
    if by == "tritonclient":
        return piece.encode() in their_texts("tritonclient", "**/*.py")
    programs = ("**/bin/tritonserver", "**/*.so", "**/*stub", "../*.libs/libtritonserver*")
    return piece.encode() in their_texts("pytriton", *programs)


def pieces(quote: str) -> list[str]:
    return [piece for piece in quote.strip().split("…") if len(piece) >= LEAST]


@pytest.mark.parametrize(("by", "quote"), QUOTES, ids=[quote[:40].strip() for _, quote in QUOTES])
def test_a_quoted_message_is_said_somewhere(by: str, quote: str) -> None:
    assert pieces(quote), "there is something to look for"
    assert [piece for piece in pieces(quote) if not is_said(by, piece)] == []


def test_every_block_is_a_quote_and_every_link_leads_to_a_heading() -> None:
    assert len(QUOTES) == PAGE.count("```") // 2 > 30
    headings = re.findall(r"^## (.*)$", PAGE, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
