"""Build the sdist and the wheel into dist/, and try the wheel in an empty environment of each Python that is named.

python scripts/try_package.py
python scripts/try_package.py python3.12 python3.13
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/busload"


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from the sdist the wheel: what the sdist lacks, the wheel lacks too."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def source_files() -> set[str]:
    """Every file of the package, as it is named in the wheel."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


class Environment:
    """A virtual environment with nothing in it but pip, outside of this folder."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        self.variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("BUSLOAD_", "PYTHON", "PG"))
        }
        self.variables |= {"BUSLOAD_HOME": str(folder / "home"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True, env=self.variables)

    def program(self, name: str) -> str:
        return str(self.folder / "venv/bin" / name)

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        command = [self.program(program), *arguments]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=300, check=False
        )
        if ran.returncode != code:
            sys.exit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return ran.stdout if code == 0 else ran.stderr

    def install(self, *requirements: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *requirements)


def try_core(environment: Environment, wheel: Path) -> None:
    """Without any extra: everything that needs none works, and the rest says what is missing."""
    environment.install(str(wheel))
    version = wheel.name.split("-")[1]
    expect(f"version {version}" in environment.run("busload", "--version"), "busload --version tells the version")
    expect("Usage: busload demo" in environment.run("busload", "demo", "--help"), "busload demo --help answers")
    environment.run("python", "-W", "error", "-c", "from busload import *; CommandBus('postgresql://nowhere')")
    expect("create schema" in environment.run("busload", "schema", "print").lower(), "busload schema print prints")
    refused = environment.run("busload", "dashboard", code=2)
    expect("busload[dashboard]" in refused, f"the dashboard names its extra, not: {refused}")


def try_extras(environment: Environment, wheel: Path) -> None:
    """A batch on the embedded server, and every file that the first page of the dashboard refers to."""
    environment.install(f"{wheel}[embedded,dashboard]")
    report: dict[str, Any] = json.loads(environment.run("busload", "demo", "--commands", "200", "--json"))
    expect(report["batch"]["status"] == "COMPLETED_WITH_FAILURES", f"the demo ends as it should, not: {report}")
    try_dashboard(environment)


def try_dashboard(environment: Environment) -> None:
    command = [environment.program("busload"), "dashboard", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=environment.folder,
        env=environment.variables | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
            page = read(address + "/")
            assets = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
            expect(len(assets) >= 3, f"the page refers to its styles and scripts, not only to {assets}")
            expect(all(read(address + asset) for asset in assets), "every style and script is served")
        finally:
            server.terminate()
            server.wait(timeout=30)


def read(address: str) -> str:
    with urlopen(address, timeout=30) as answer:  # noqa: S310 - our own server on the loopback
        return str(answer.read().decode())


def expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"Expected that {what}.")


def write_bill(environment: Environment, folder: Path) -> None:
    """The bill of materials of what pip has installed with the wheel, beside the wheel."""
    site = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    command = [sys.executable, str(ROOT / "scripts/bill_of_materials.py"), site, "busload"]
    (folder / "busload.cdx.json").write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(pythons: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="busload-package-") as folder:
        Path(folder).chmod(0o755)  # root's server runs as another user, and would go to /var/lib/busload
        sdist, wheel = build(Path(folder) / "dist")
        print(f"{sdist.name} {sdist.stat().st_size // 1024} kB, {wheel.name} {wheel.stat().st_size // 1024} kB")
        shutil.copytree(sdist.parent, ROOT / "dist", dirs_exist_ok=True)
        missing = source_files() - files_of_wheel(wheel)
        expect(not missing, f"the wheel has every file of the package; missing: {sorted(missing)}")
        for number, python in enumerate(pythons):
            began = time.monotonic()
            environment = Environment(python, Path(folder) / str(number))
            try_core(environment, wheel)
            if number == 0:
                write_bill(environment, ROOT / "dist")
            try_extras(environment, wheel)
            release = environment.run("python", "--version").strip()
            print(f"{release}: help, demo and dashboard work; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
