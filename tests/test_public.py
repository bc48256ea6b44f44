"""What `import busload` gives, though it imports nothing before it is asked to."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import busload


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


FOLDERS = (
    *(
        "audit",
        "batches",
        "buffers",
        "commands",
        "dispatch",
        "doctor",
        "explain",
        "handlers",
        "health",
        "jobs",
        "limits",
    ),
    *("limits", "metrics", "retention", "schedules", "statistics", "sync", "tasks", "telemetry", "transports"),
    *("troubleshooting", "worker"),
)


def public_names() -> dict[str, Any]:
    """Every name that users may import, from `busload` or from one of its folders."""
    folders = [busload, *(import_module(f"busload.{folder}") for folder in FOLDERS)]
    return {f"{folder.__name__}.{name}": getattr(folder, name) for folder in folders for name in folder.__all__}


def test_the_reference_says_from_where_each_name_is_imported() -> None:
    text = (Path(__file__).parents[1] / "docs/reference.md").read_text()
    rows = dict(re.findall(r"^\| `(busload[.\w]*)` \| (.*) \|$", text, re.M))
    listed = {f"{folder}.{name}" for folder, names in rows.items() for name in re.findall(r"`(\w+)`", names)}
    top = {f"busload.{name}" for name in busload.__all__}
    assert listed == top | {name for name in public_names() if name.rpartition(".")[2] not in busload.__all__}


def test_every_public_name_is_found_and_listed() -> None:
    for name in busload.__all__:
        assert getattr(busload, name).__name__ == name
    assert set(busload.__all__) <= set(dir(busload))
    assert run("from busload import *; print(CommandBus.__name__, task_key('a', 1))") == "CommandBus a:1"


def test_importing_busload_itself_imports_nothing_else_of_it() -> None:
    assert run("import sys, busload; print(*(n for n in sys.modules if n.startswith('busload')))") == "busload"


def test_a_module_is_found_as_well() -> None:
    assert run("import busload; print(busload.errors.BusloadError.__name__)") == "BusloadError"


def test_an_unknown_name_is_none_of_ours() -> None:
    with pytest.raises(AttributeError, match="module 'busload' has no attribute 'Nonsense'"):
        busload.Nonsense  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nonsense' from 'busload'"):
        from busload import Nonsense  # type: ignore[attr-defined]  # noqa: F401
