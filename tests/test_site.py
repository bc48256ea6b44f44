"""The site of the docs: it builds without a warning, every link on it leads somewhere, and it asks no other host."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@dataclass
class Page(HTMLParser):
    """What a page refers to, and the anchors that others can refer to."""

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def __hash__(self) -> int:
        return hash(self.path)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and (href := given.get("href")):
            self.links.append(href)
        elif target := given.get("src") or given.get("href"):
            self.loaded.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    zensical = Path(sys.executable).with_name("zensical")
    ran = subprocess.run([zensical, "build", "--strict"], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "No issues found" in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_page_of_the_docs_is_on_the_site(site: Path, pages: dict[Path, Page]) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        made = site / "index.html" if source.stem == "index" else site / source.stem / "index.html"
        assert made in pages
    assert (site / "llms.txt").read_text() == (ROOT / "docs/llms.txt").read_text()


def test_every_link_and_every_anchor_on_the_site_exists(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for page in pages.values():
        if page.path.name == "404.html":
            continue  # its links are absolute, since it is shown at any path
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            found = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            found = found / "index.html" if found.is_dir() else found
            anchors = pages[found].anchors if found in pages else set()
            if not found.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{page.path.relative_to(site)}: {link}")
    assert broken == []


def test_a_page_loads_nothing_from_another_host(pages: dict[Path, Page]) -> None:
    outside = {target for page in pages.values() for target in page.loaded if urlsplit(target).netloc}
    assert outside == set()


def test_the_search_finds_words_of_every_page(site: Path) -> None:
    found = json.loads((site / "search.json").read_text())
    searched = {item["location"].partition("#")[0].strip("/") for item in found["items"]}
    wanted = {"" if page.stem == "index" else page.stem for page in (ROOT / "docs").glob("*.md")}
    assert wanted <= searched


def test_the_site_shows_the_version_that_it_is_about(pages: dict[Path, Page], site: Path) -> None:
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["copyright"] == f"busload {VERSION}"
    assert f"busload {VERSION}" in (site / "index.html").read_text()


# -- What is made from something else --------------------------------------------------------------------------------


def made() -> dict[str, Callable[[], str]]:
    script = runpy.run_path(str(ROOT / "scripts/generate_docs.py"))
    pages: dict[str, Callable[[], str]] = script["PAGES"]
    return pages


@pytest.mark.parametrize("name", ["api.md", "changelog.md", "llms.txt"])
def test_a_page_that_is_made_is_as_its_source_says(name: str) -> None:
    """`make figures` writes them."""
    assert (ROOT / "docs" / name).read_text() == made()[name](), f"docs/{name} is old: run `make figures`"


def test_the_comparison_has_the_figures_of_the_readme() -> None:
    tables = [
        re.findall(r"^\| per second .*\n(?:\|.*\n)+", (ROOT / name).read_text(), re.MULTILINE)
        for name in ("README.md", "docs/comparison.md")
    ]
    assert tables[0] == tables[1] != []


# -- A folder for each release ---------------------------------------------------------------------------------------


def published(folder: Path, site: Path, version: str) -> list[dict[str, Any]]:
    runpy.run_path(str(ROOT / "scripts/publish_docs.py"))["publish"](site, folder, version)
    known: list[dict[str, Any]] = json.loads((folder / "versions.json").read_text())
    return known


def test_each_release_has_a_folder_and_the_newest_is_latest(tmp_path: Path) -> None:
    (site := tmp_path / "site").mkdir()
    for version in ("0.2.0", "0.10.0", "0.9.3", "0.10.1"):
        (site / "index.html").write_text(f"busload {version}")
        known = published(tmp_path / "public", site, version)
    assert known == [
        {"version": "0.10", "title": "0.10.1", "aliases": ["latest"]},
        {"version": "0.9", "title": "0.9.3", "aliases": []},
        {"version": "0.2", "title": "0.2.0", "aliases": []},
    ]
    shown = {one: (tmp_path / "public" / one / "index.html").read_text() for one in ("0.2", "0.9", "0.10", "latest")}
    newest = "busload 0.10.1"
    assert shown == {"0.2": "busload 0.2.0", "0.9": "busload 0.9.3", "0.10": newest, "latest": newest}
    assert 'url=latest/"' in (tmp_path / "public/index.html").read_text()


def test_what_a_release_no_longer_has_leaves_its_folder(tmp_path: Path) -> None:
    (site := tmp_path / "site").mkdir()
    (old := site / "old.html").touch()
    published(tmp_path / "public", site, "1.0.0")
    old.unlink()
    (site / "new.html").touch()
    published(tmp_path / "public", site, "1.0.1")
    assert [path.name for path in (tmp_path / "public/1.0").iterdir()] == ["new.html"]
