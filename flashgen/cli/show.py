"""`python -m flashgen show`: one kernel at any stage of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from flashgen import lower
from flashgen.build import Stages
from flashgen.cli import mask
from flashgen.cli.options import parse_problem, problem, select
from flashgen.ir.graph import dataflow
from flashgen.ir.nodes import For, Kernel
from flashgen.ir.printer import kernel_text
from flashgen.ir.visit import Body

ARROWS = {"raw": "reads", "war": "overwrites what reads", "waw": "overwrites"}
COLOURS = {"raw": "black", "war": "blue", "waw": "red"}


def passes_text(stages: Stages) -> str:
    """The TILE text, then the IR after each pass that changed it under the pass's own sentence."""
    family = lower.FAMILIES[stages.plan.arch.family]
    sentences = {step.__name__: (step.__doc__ or "").split("\n")[0] for step in (*lower.TILE_PASSES, *family)}
    parts = [f"=== {stages.tile.name}, before any pass\n{kernel_text(stages.tile)}"]
    last = [stages.tile]

    def watch(name: str, after: Kernel) -> None:
        if after != last[0]:
            parts.append(f"=== {name}: {sentences[name]}\n{kernel_text(after)}")
        last[0] = after

    lower.run(stages.tile, stages.plan, watch)
    return "\n".join(parts)


def loop_body(kernel: Kernel) -> Body:
    """The body of the kernel's loop, or the whole kernel where it has none."""
    return next((stmt.body for stmt in kernel.body if isinstance(stmt, For)), kernel.body)


def graph_text(kernel: Kernel) -> str:
    """The dataflow graph as text: each statement, and what it has to stay behind."""
    graph = dataflow(loop_body(kernel))
    lines = [f"dataflow of the loop of {kernel.name}: {len(graph)} statements, {graph.number_of_edges()} dependences"]
    for node, text in graph.nodes(data="text"):
        lines.append(f"  {node:2d}  {text}")
        for kind, phrase in ARROWS.items():
            edges = [
                (source, edge["buffer"]) for source, _, edge in graph.in_edges(node, data=True) if edge["kind"] == kind
            ]
            if edges:
                lines.append(f"        {phrase} " + ", ".join(f"{buffer} of {source}" for source, buffer in edges))
    return "\n".join(lines) + "\n"


def dot_text(kernel: Kernel) -> str:
    """The dataflow graph in the DOT language: solid where a value flows, dashed where only the order is held."""
    graph = dataflow(loop_body(kernel))
    lines = [f'digraph "{kernel.name}" {{', '  node [shape=box, fontname="monospace"];']
    lines += [f"  n{node} [label={_quoted(text)}];" for node, text in graph.nodes(data="text")]
    for source, target, edge in graph.edges(data=True):
        style = "solid" if edge["kind"] == "raw" else "dashed"
        look = f"style={style}, color={COLOURS[edge['kind']]}"
        lines.append(f"  n{source} -> n{target} [label={_quoted(edge['buffer'])}, {look}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# The text of each stage, and the help of its flag
STAGES: dict[str, tuple[Callable[[Stages], str], str]] = {
    "cuda": (lambda stages: stages.source.text, "The CUDA source.  [default]"),
    "ir": (lambda stages: kernel_text(stages.tile), "The TILE level: tiles and mathematics, no device."),
    "machine": (lambda stages: kernel_text(stages.machine), "The MACHINE level: copies, waits, matrix instructions."),
    "plan": (lambda stages: stages.plan.text(), "Tile, warps, stages and the map of shared memory."),
    "graph": (lambda stages: graph_text(stages.tile), "The dataflow graph of the loop body, at TILE level."),
    "passes": (passes_text, "The IR before the first pass and after each pass that changed it."),
}
# The mask is no stage of a kernel: it is drawn from the specification
FLAGS = {name: meaning for name, (_, meaning) in STAGES.items()} | {
    "mask": "Which query sees which key, and which blocks are skipped, full or partial."
}


def stage_flags(function: Callable) -> Callable:
    """A flag for each stage and for the mask; the command is handed each by its name."""
    for name, meaning in reversed(FLAGS.items()):
        function = click.option(f"--{name}", is_flag=True, help=meaning)(function)
    return function


def the_stage(flags: dict[str, bool]) -> str:
    """The stage whose flag is given, "cuda" without any. Raises UsageError where two are."""
    given = [name for name in FLAGS if flags[name]]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise click.UsageError(f"{names} exclude each other: one stage is shown at a time; give one of them.")
    return given[0] if given else "cuda"


@click.command("show")
@problem(kernel_default="forward")
@stage_flags
@mask.options
@click.option("--dot", type=click.Path(dir_okay=False), help="Also write the graph as Graphviz DOT (one kernel).")
@click.option("--png", type=click.Path(dir_okay=False), help="Also write the mask as a picture (needs matplotlib).")
def command(kernel: str, dot: str | None, png: str | None, **options: Any) -> None:
    """Print a kernel at any stage between its specification and its CUDA, or draw its mask.

    FILE is a Python file with `options`: a dict of mask_mod, score_mod, causal, window and softcap, as
    flashgen.attention takes them. It stands in place of --causal, --window and --softcap.

    \b
    Examples:
      python -m flashgen show --head-dim 64 --causal                     the CUDA of the forward
      python -m flashgen show --head-dim 64 --ir --kernel backward       the backward's loop nest
      python -m flashgen show --head-dim 64 --passes | less              how the one becomes the other
      python -m flashgen show --head-dim 64 --graph --dot loop.dot       then: dot -Tsvg loop.dot > loop.svg
      python -m flashgen show --mask --causal --window 16,0              which query sees which key
      python -m flashgen show --mask examples/masks/strided.py --png strided.png
    """
    if dot and kernel.removeprefix("attention_") == "all":
        raise click.UsageError("--dot draws one kernel; name it with --kernel.")
    stage = the_stage({name: options.pop(name) for name in FLAGS})
    sizes = mask.Sizes(**{name: options.pop(name) for name in mask.Sizes.__dataclass_fields__})
    spec, arch = parse_problem(**options)
    if png:
        mask.write_png(mask.draw(spec, sizes), png)
    if stage == "mask":
        click.echo(mask.drawing_text(mask.draw(spec, sizes)), nl=False)
        return
    text, _ = STAGES[stage]
    for count, stages in enumerate(select(spec, arch, kernel)):
        click.echo(("\n" if count else "") + text(stages), nl=False)
        if dot:
            with open(dot, "w", encoding="utf-8") as file:
                file.write(dot_text(stages.tile))
