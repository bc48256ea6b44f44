"""The sync face is what the script makes of the async one, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/generate_sync.py"


def test_the_sync_face_is_what_the_script_makes_of_the_async_one() -> None:
    spec = importlib.util.spec_from_file_location("generate_sync", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    made = {path.name: text for path, text in script.generate().items()}

    found = {path.name: path.read_text(encoding="utf-8") for path in script.FOLDER.glob("*.py")}
    del found["__init__.py"]
    assert found.keys() == made.keys()
    for name, text in made.items():
        assert found[name] == text, f"{name} is not what its source makes. Run `make sync`, and change the source only."
