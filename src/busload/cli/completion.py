"""`busload completion`: what a shell has to know to complete nouns, verbs, options, domains and ids."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from busload.cli import options
from busload.cli.output import echo_json

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@options.as_json
@click.pass_context
def completion(ctx: click.Context, /, shell: str, as_json: bool) -> None:
    """Print the script that lets a shell complete what you type.

    Nouns, verbs, options and their values are completed at once; domains, and ids of batches, jobs and commands, are
    asked from the database, which has a third of a second for the answer. Without a database nothing is said.

        busload completion bash >> ~/.bashrc
        busload completion zsh >> ~/.zshrc
        busload completion fish > ~/.config/fish/completions/busload.fish
    """
    make = get_completion_class(shell)
    assert make is not None, f"click does not know {shell}"
    script = make(ctx.find_root().command, {}, "busload", "_BUSLOAD_COMPLETE").source()
    if as_json:
        echo_json({"shell": shell, "script": script})
    else:
        click.echo(script)
