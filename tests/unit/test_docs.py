"""The documentation builds as a site, its links lead somewhere, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from octavo.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # With --quiet, --strict counts no warning.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == {page.name for page in PAGES} - {"index.md"}


def test_links_of_the_readme_lead_to_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", readme)}
    missing = {t for t in targets if t and "://" not in t and not (ROOT / t).exists()}
    assert missing == set()


def test_commands_that_the_pages_show_exist_and_so_do_their_options() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "README.md"])
    text = text.replace("\\\n", " ")
    pieces = re.findall(r"`([^`\n]+)`", text) + text.splitlines()
    shown = [re.match(r" *(?:\$ )?(?:\.venv/bin/)?octavo ([a-z].*)", piece) for piece in pieces]
    commands = [found[1].split() for found in shown if found]
    assert len(commands) > 50
    for name, *words in commands:
        own = words[: words.index("--")] if "--" in words else words
        options = {option for each in main.commands[name].params for option in each.opts}
        assert {word for word in own if word.startswith("--")} <= {*options, "--help"}, name
