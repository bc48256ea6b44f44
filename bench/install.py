"""`python -m bench.install`: an environment for each peer, outside of the repository. Quick when they are there.

A peer that cannot be installed is remembered with the reason, and named as not measured by the benchmark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import click

from bench.beside import PEERS, PROGRAMS, Peer, is_installed

NODE = "node@22.23.3"
OLDEST_NODE = (22, 18)
SLOWEST = 600


class Impossible(Exception):
    """The reason why a peer cannot be installed, in a line."""


@click.command()
def main() -> None:
    """Install what the benchmark measures beside busload."""
    for peer in PEERS:
        if peer.lacks is None:
            continue
        click.echo(f"Installing {peer.title}", err=True)
        try:
            _install(peer)
        except Impossible as why:
            (peer.home / "failed").write_text(f"{why}\n")
            click.echo(f"{peer.title} will not be measured: {why}", err=True)


def _install(peer: Peer) -> None:
    shutil.rmtree(peer.home, ignore_errors=True)
    peer.home.mkdir(parents=True)
    if program := PROGRAMS.get(peer.store):
        _debian(program, program)
    if peer.node:
        _debian("npm", "nodejs", "npm")
        (peer.home / "package.json").write_text(json.dumps({"private": True}))
        wanted = [*peer.packages, *([] if _node_version() >= OLDEST_NODE else [NODE])]
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(peer.home), *wanted])
    else:
        _run([sys.executable, "-m", "venv", str(peer.home)])
        _run([str(peer.home / "bin" / "python"), "-m", "pip", "install", "--quiet", *peer.packages])
    (peer.home / "ready").write_text(peer.wanted)


def _debian(program: str, *packages: str) -> None:
    """A program that comes with Debian; only root may install it."""
    if is_installed(program):
        return
    by_hand = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Impossible(f"{program} is not installed; install it with: {by_hand}")
    _run(["apt-get", "update", "-qq"])
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages])


def _node_version() -> tuple[int, ...]:
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    return tuple(map(int, re.findall(r"\d+", said)))


def _run(command: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLOWEST, env=environment, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Impossible(f"`{command[0]}` took more than {SLOWEST} seconds") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "warn" not in line.lower()]
        raise Impossible(f"`{' '.join(command[:3])}` failed: {' '.join(lines)[:300]}")


if __name__ == "__main__":
    main()
