"""Dependencies point one way: a folder imports only folders below it, also for types and inside of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import busload

PACKAGE = Path(busload.__file__).parent

CAPABILITIES = {
    "audit",
    "tasks",
    "limits",
    "batches",
    "jobs",
    "troubleshooting",
    "buffers",
    "transports",
    "dispatch",
    "explain",
    "health",
    "metrics",
    "doctor",
    "retention",
    "statistics",
}
LAYERS = (
    {"errors"},
    {"settings"},
    {"telemetry"},
    {"postgres"},
    {"commands"},
    CAPABILITIES,
    {"handlers"},
    {"schedules"},
    {"bus"},
    {"shards"},
    {"worker"},
    {"dashboard", "testing", "imports", "integrations"},
    {"cli"},
    {"integrations"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PUBLIC = {"__init__", "sync"}  # what users import: it gathers names from everywhere

# An exception names the type of the report that it carries.
# The plugin of pytest has a fixture for Django, which imports it when it is used.
ALLOWED = {("errors.py", "dispatch"), ("testing/plugin.py", "integrations")}


def part_of(path: Sequence[str]) -> str:
    """The folder or module that a path belongs to. A module of sync/ belongs where its source is."""
    module = PACKAGE / "sync" / f"{path[1]}.py" if path[0] == "sync" and len(path) > 1 else None
    if module is None or path[1] == "__init__":
        return path[0]
    made_from = re.match(r'"""Made from busload\.(\w+)', module.read_text())
    assert made_from is not None, f"{module} does not say what it is made from"
    return made_from[1]


def imports() -> Iterator[tuple[str, str, str]]:
    """Every import of another part of the package: the file, its part, the other part. Parts are folders or modules."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        part = part_of(file.with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file} imports a relative name"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for package, *rest in (name.split(".") for name in names):
                is_part = rest and any((PACKAGE / name).exists() for name in (rest[0], f"{rest[0]}.py"))
                other = part_of(rest) if is_part else "__init__"
                if package == "busload" and other != part:
                    yield file.as_posix(), part, other


def is_upward(part: str, other: str) -> bool:
    if part in PUBLIC:
        return other == "cli"
    if other in PUBLIC:
        return part not in ("cli", "dashboard", "testing", "integrations")
    if {part, other} <= CAPABILITIES:
        return False  # capabilities know each other, without a circle
    return RANK[part] <= RANK[other]


def test_a_folder_imports_only_folders_below_it() -> None:
    assert {(file, other) for file, part, other in imports() if is_upward(part, other)} == ALLOWED


def test_capabilities_import_each_other_without_a_circle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in CAPABILITIES}
    for _, part, other in imports():
        if part in CAPABILITIES and other in CAPABILITIES:
            edges[part].add(other)
    assert set(TopologicalSorter(edges).static_order()) == CAPABILITIES  # raises CycleError if there is one


def test_nothing_but_a_framework_with_commands_of_its_own_imports_the_command_line() -> None:
    found = {file for file, _, other in imports() if other == "cli"}
    commands = "integrations/django_app/management/commands"
    assert found == {f"{commands}/busload.py", f"{commands}/busload_worker.py"}
