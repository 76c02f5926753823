"""`python -m flashgen explain`: the planner's choice and why."""

from __future__ import annotations

from typing import Any

import click

from flashgen.cli.options import parse_problem, problem, select


@click.command("explain")
@problem(kernel_default="all")
def command(kernel: str, **options: Any) -> None:
    """Show why each kernel has its tile: the choice, the ranking of what fits, a sentence for each rejection.

    The planner tries a few dozen combinations of block sizes, warps and stages, drops those that the chip's shared
    memory and registers do not hold, and ranks the rest by the clocks that they are expected to take. --sram shows how
    the choice moves on a chip with more or less shared memory. Where nothing fits, one sentence names the limit.
    FILE is a Python file with `options`: a dict of mask_mod, score_mod, causal, window and softcap.

    \b
    Examples:
      python -m flashgen explain --head-dim 128 --causal --arch sm_86
      python -m flashgen explain --head-dim 128 --kernel forward --sram 64KiB
      python -m flashgen explain --head-dim 192 --head-dim-v 128 --kernel backward --arch sm_90
    """
    spec, arch = parse_problem(**options)
    click.echo(f"{spec} on {arch.name} ({arch.title}), {arch.shared_per_block / 1024:g} KiB of shared memory a block")
    for stages in select(spec, arch, kernel):
        click.echo(f"\n{stages.plan.explain()}", nl=False)
