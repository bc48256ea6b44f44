"""Plants every mutant in a copy of its own and runs the test that must notice it.

`python -m tests.mutants.run`, with names for some of them only. First the named tests run on an unchanged copy, where
all must pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants.mutants import MUTANTS, ROOT, Mutant

AT_ONCE = 2
LONGEST = 900.0
"""Seconds that the tests may take together; a test that a mutant makes hang ends by its own limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    code: int
    summary: str
    seconds: float
    said: str

    @property
    def reason(self) -> str:
        """The first line of the error that the test failed with."""
        return next((line[1:].strip() for line in self.said.splitlines() if line.startswith("E  ")), self.summary)

    @property
    def noticed(self) -> bool:
        """The test itself failed: not its collection, nor only what surrounds it."""
        return self.code == 1 and " failed" in self.summary


@contextmanager
def copy(original: Path) -> Iterator[Path]:
    """The package and its tests, with what those import, outside of the work tree, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="busload-mutant-"))
    folder.chmod(0o755)
    try:
        for name in ("src", "tests", "examples", "bench"):
            shutil.copytree(original / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(original / "pyproject.toml", folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(folder: Path, tests: Sequence[str]) -> Verdict:
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    found = subprocess.run(
        [sys.executable, "-c", "import busload; print(busload.__file__)"], env=env, cwd=folder, capture_output=True
    )
    if not found.stdout.decode().startswith(str(folder)):
        raise RuntimeError(f"The copy is not what would be tested: {found.stdout!r} {found.stderr!r}")
    began = time.monotonic()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", "60"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
        )
    except subprocess.TimeoutExpired:
        return Verdict(-1, "did not end", time.monotonic() - began, "")
    lines = ran.stdout.strip().splitlines() or [""]
    return Verdict(ran.returncode, lines[-1].strip("= "), time.monotonic() - began, ran.stdout)


def tried(original: Path, mutant: Mutant) -> Verdict:
    with copy(original) as folder:
        file = folder / "src/busload" / mutant.file
        file.write_text(mutant.planted(file.read_text()))
        return judge(folder, [mutant.test])


def main(names: Sequence[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in chosen}:
        print("There is no mutant named", ", ".join(sorted(unknown)))
        return 2
    with copy(ROOT) as original:  # somebody may go on working
        return tell(original, chosen)


def tell(original: Path, chosen: Sequence[Mutant]) -> int:
    for mutant in chosen:
        mutant.planted((original / "src/busload" / mutant.file).read_text())
    sane = judge(original, sorted({mutant.test for mutant in chosen}))
    if sane.code != 0:
        print(sane.said[-8000:])
        print("The tests must pass before anything is planted:", sane.summary)
        return 2
    print(f"Without mutants: {sane.summary}", flush=True)
    survived = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, verdict in zip(chosen, pool.map(partial(tried, original), chosen), strict=True):
            survived += not verdict.noticed
            word = "killed" if verdict.noticed else "SURVIVED"
            print(f"{word:9} {mutant.name:44} {verdict.seconds:5.0f} s  {mutant.test.partition('::')[2]}")
            print(f"          {verdict.reason:.110}", flush=True)
            if not verdict.noticed:
                print(f"          {mutant.why}\n          {verdict.summary}\n{verdict.said[-1500:]}")
    print(f"{len(chosen) - survived} of {len(chosen)} mutants killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
