"""What CONTRIBUTING.md and docs/design.md say about files is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/busload"


def section(file: str, heading: str) -> str:
    """Return a section of a page, up to the next heading of its level."""
    _, _, rest = (ROOT / file).read_text().partition(f"\n## {heading}\n")
    assert rest, f"{file} has no section {heading!r}"
    return rest.partition("\n## ")[0]


def test_where_do_i_change_x_names_files_that_exist() -> None:
    rows = re.findall(
        r"^\| (?!to change|---)(.+?) \| (.+) \|$", section("CONTRIBUTING.md", "Where do I change X?"), re.M
    )
    assert len(rows) >= 15
    named = {change: re.findall(r"`((?:src|scripts)/[\w./]+)`", place) for change, place in rows}
    assert [change for change, paths in named.items() if len(paths) != 1] == [], "each names one file or folder"
    assert [path for paths in named.values() for path in paths if not (ROOT / path).exists()] == []


def test_where_a_line_belongs_lists_every_folder() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", section("CONTRIBUTING.md", "Where a line belongs"), re.M)
    assert sorted(listed) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_the_way_of_a_command_passes_files_and_folders_that_exist() -> None:
    text = section("docs/design.md", "The folders, and the way of a command")
    picture = text.partition("```text")[2].partition("```")[0]
    folders = {f"{name}/" for name in re.findall(r"(\w+)/", picture)}
    assert folders == {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    files = re.findall(r"`(\w+/[\w/.]*)`", text) + re.findall(r"\b(\w+\.py)\b", picture)
    assert [name for name in files if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []
    assert [name for name in re.findall(r"\b(\w+\.sql)\b", picture) if not (PACKAGE / "commands" / name).exists()] == []
