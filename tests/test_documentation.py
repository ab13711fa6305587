"""The documentation names what there is, and its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from forerun import SamplingParams
from forerun.cli.app import COMMANDS
from forerun.config.settings import EngineSettings
from forerun.drafters.registry import DRAFTERS
from forerun.verify import VERIFIERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")


def anchors(page):
    """The anchors that a page's headings make."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: no {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: no {anchor} in {target}"


def test_modules_that_are_run_exist():
    run = {name for page in PAGES for name in re.findall(r"python -m (benchmarks[\w.]*)", page.read_text())}
    absent = [name for name in run if importlib.util.find_spec(name) is None]
    assert run
    assert not absent


def names_in_tables(page, heading):
    """What stands in backticks in the first column of the tables under a heading."""
    section = (ROOT / "docs" / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_table_of_settings_lists_every_setting():
    assert names_in_tables("offline.md", "Settings") == {f.name for f in fields(EngineSettings)}


def test_the_table_of_sampling_lists_every_parameter():
    assert names_in_tables("offline.md", "Sampling") == {f.name for f in fields(SamplingParams) if f.init}


def test_every_drafter_has_a_page():
    assert all((ROOT / "docs" / "drafters" / f"{method}.md").exists() for method in DRAFTERS)


def test_every_verifier_is_described():
    text = (ROOT / "docs" / "verification.md").read_text()
    assert all(f"`{name}`" in text for name in VERIFIERS)


def test_every_command_has_a_page():
    assert all((ROOT / "docs" / "commands" / f"{name}.md").exists() for name in COMMANDS)
