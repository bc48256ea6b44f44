"""What `import busload` gives, though it imports nothing before it is asked to."""

from __future__ import annotations

import subprocess
import sys

import pytest

import busload
from busload import public


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_every_public_name_is_found_and_listed() -> None:
    for name in public.__all__:
        assert getattr(busload, name) is getattr(public, name)
    assert set(public.__all__) <= set(dir(busload))
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
