"""Put the built site into the folder of its release, beside those of other releases.

    make docs && python scripts/publish_docs.py /srv/docs

Each minor release has a folder, such as `0.2/`; `latest/` is a copy of the newest. `versions.json` is what the switch
on the pages reads.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>busload</title>
<meta http-equiv="refresh" content="0; url=latest/">
"""


def publish(site: Path, folder: Path, version: str) -> None:
    """Replace the folder of this minor release, and `latest/` if none is newer."""
    minor = version.rpartition(".")[0]
    known = folder / "versions.json"
    titles = {one["version"]: one["title"] for one in json.loads(known.read_text())} if known.exists() else {}
    titles[minor] = version
    newest, *_ = ordered = sorted(titles, key=lambda one: [int(number) for number in one.split(".")], reverse=True)
    for name in (minor, "latest") if minor == newest else (minor,):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(site, folder / name)
    versions = [
        {"version": one, "title": titles[one], "aliases": ["latest"] if one == newest else []} for one in ordered
    ]
    known.write_text(json.dumps(versions, indent=2) + "\n")
    (folder / "index.html").write_text(REDIRECT)


if __name__ == "__main__":
    [target] = sys.argv[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    publish(ROOT / "site", Path(target), project["version"])
