"""The pictures of the documentation: the script that takes them runs, and the documentation shows what there is."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

from scripts import screenshots

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/assets/dashboard"
LARGEST = 80_000
"""Bytes of a picture, so that the repository stays small."""


async def test_the_script_takes_a_page_and_what_it_leads_to_in_every_look(tmp_path: Path) -> None:
    taken = await screenshots.take(tmp_path, only="commands", animate=False, share=0.02)
    names = [f"{page}-{look}.png" for look in ("light", "dark", "phone") for page in ("commands", "commands-one")]
    assert [path.name for path in taken] == names
    assert max(path.stat().st_size for path in taken) < LARGEST
    light, dark, phone = (Image.open(tmp_path / name).convert("L") for name in names[::2])
    assert light.size == dark.size == (1280, 860) and phone.size == (390, 844)
    assert sum(light.histogram()[200:]) > 10 * sum(dark.histogram()[200:])  # most of it is bright


def test_the_documentation_shows_pictures_that_are_there_and_small() -> None:
    shown = [
        (page.parent / path).resolve()
        for page in (ROOT / "README.md", ROOT / "docs/dashboard.md")
        for path in re.findall(r"\]\((\S*assets/dashboard/\S+?)\)", page.read_text())
    ]
    assert len(shown) > 3
    assert [path.name for path in shown if not path.exists()] == []
    assert [path.name for path in PICTURES.glob("*.png") if path.stat().st_size > LARGEST] == []
