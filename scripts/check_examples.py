"""Check the types of the examples as a user's project would be checked: strictly, by mypy and pyright.

`make lint` runs it. The examples are copied to a folder of their own, so that no setting of this repository counts, and
busload is found where pip has installed it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNTYPED = ("celery_bridge.py", "tracker_celery.py", "django_app.py", "django_shop")
"""Files and folders of examples with libraries that have no types: Celery and Django."""
OURS = "cluster"
"""A folder of examples that needs the tests of this repository, so no user has it."""
REFUSED = ROOT / "tests/handlers/refused_by_type_checkers.py"
"""What both must refuse: each call of it has an ignore, and an ignore that is not needed is an error."""

PYRIGHT = {"include": ["."], "typeCheckingMode": "strict", "enableTypeIgnoreComments": True, "pythonVersion": "3.11"}
MYPY = "[mypy]\nstrict = true\npython_version = 3.11\nmypy_path = examples/alembic_shop\n"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="busload-user-") as name:
        project = Path(name)
        for file in [*sorted((ROOT / "examples").rglob("*.py")), REFUSED]:
            if not {*UNTYPED, OURS}.intersection(file.parts):
                place = project / file.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
        (project / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
        (project / "mypy.ini").write_text(MYPY)
        cache = ROOT / ".mypy_cache" / "examples"
        checkers = [
            ["mypy", "--cache-dir", str(cache), "--explicit-package-bases", "."],
            ["basedpyright", "--pythonpath", sys.executable, "--project", "."],
        ]
        codes = [subprocess.run([sys.executable, "-m", *one], cwd=project).returncode for one in checkers]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
