"""`python -m busload.cli` is `busload`; a worker starts its processes so."""

from busload.cli import main

main(prog_name="busload")
