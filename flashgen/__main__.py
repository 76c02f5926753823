"""The command line: `python -m flashgen`, or `flashgen` where it is installed. Commands are imported when asked for."""

from __future__ import annotations

import importlib

import click

from flashgen import __version__, debug

# name -> where the command is, and its line in the list of commands (to read it from there would import torch)
COMMANDS = {
    "explain": ("flashgen.cli.explain", "Why a kernel has its tile: the choice, the ranking, the rejections."),
    "show": ("flashgen.cli.show", "A kernel at any stage: IR, plan, CUDA, dataflow graph, pass by pass."),
    "generate": ("flashgen.cli.generate", "Write generated/ and compile all of it for every chip."),
    "bench": ("flashgen.bench.run", "Time flashgen beside its peers (needs a GPU and torch)."),
    "tune": ("flashgen.bench.tune", "Time the planner's candidates (needs a GPU and torch)."),
    "env": ("flashgen.cli.env", "Versions, GPUs, the cache and the environment variables."),
}


class Commands(click.Group):
    """A group that imports a command when it is asked for, and prints what goes wrong in one as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of a first visit."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(COMMANDS[cmd_name][0]).command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; at FLASHGEN_DEBUG >= 1 an error keeps its traceback."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, BrokenPipeError):  # click's own; `| head` has read enough
            raise
        except Exception as error:
            if _keeps_traceback(error):
                raise
            raise click.ClickException(str(error)) from None


def _keeps_traceback(error: Exception) -> bool:
    """True for a bug, and for every error where FLASHGEN_DEBUG asks for it (a value that is no level asks for none)."""
    try:
        return debug.level() >= 1 or not _is_expected(error)
    except ValueError:
        return not _is_expected(error)


def _is_expected(error: Exception) -> bool:
    """True where the message is for the user: refused input, something missing, or an error that flashgen declares."""
    declared = type(error).__module__.split(".")[0] == "flashgen"
    return declared or isinstance(error, ValueError | ImportError | OSError)


@click.command(cls=Commands)
@click.version_option(__version__, prog_name="flashgen")
def main() -> None:
    """flashgen writes exact-attention CUDA kernels: from a specification to readable, specialised source.

    Each command needs no GPU unless it says so, and has its own --help with examples.

    \b
    Where to begin:
      python -m flashgen show --head-dim 128 --causal              the CUDA of the forward
      python -m flashgen show --head-dim 128 --causal --ir         what it was made from
      python -m flashgen explain --head-dim 128 --arch sm_86       why its tile is what it is
      python -m flashgen env                                       what is installed here
    """


if __name__ == "__main__":
    main()
