"""Options that `explain` and `show` share: which spec, on which chip, and which of its kernels."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from flashgen import build, variants
from flashgen.build import Stages
from flashgen.ir.dtype import F32
from flashgen.plan.arch import ARCHES, Arch, parse_arch, with_shared_memory
from flashgen.plan.planner import PlanError
from flashgen.spec import LENGTHS, Function, Spec, check_kernels, parse_dtype

UNITS = {"": 1, "k": 1024, "m": 1024**2}
FUNCTIONS = tuple(inspect.signature(variants.functions).parameters)
KERNELS = ("forward", "backward", "delta", "convert_dq", "backward_dq", "sink_sums", "dsinks", "all")


class ByteCount(click.ParamType):
    """A number of bytes: 65536, 96K, 64KiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, or click's error that names what is accepted."""
        match = re.fullmatch(r"(\d+)\s*(?:(k|m)(?:i?b)?|b)?", str(value).strip().lower())
        if not match:
            self.fail(f"{value!r} is not a number of bytes; write 64KiB, 96K or 65536", param, ctx)
        return int(match[1]) * UNITS[match[2] or ""]


def problem(kernel_default: str) -> Callable[[Callable], Callable]:
    """A file and the options of a spec, a chip and a kernel; the command is handed each by its name."""
    made = (
        click.argument("file", required=False, type=click.Path()),
        click.option(
            "--head-dim", type=int, default=128, show_default=True, help="Of q and k: a multiple of 8 to 576."
        ),
        click.option("--head-dim-v", type=int, help="Of v, where it differs: up to 512."),
        click.option("--causal/--full", help="Which keys a query sees.  [default: full]"),
        click.option("--top-left", is_flag=True, help="As --causal, aligned with the first key instead of the last."),
        click.option("--window", help="LEFT,RIGHT: keys seen on both sides; 'all' for any number of them."),
        click.option("--softcap", type=float, help="Scores become softcap * tanh(score / softcap)."),
        click.option("--sinks", is_flag=True, help="Each head has a logit that takes part in the denominators alone."),
        click.option("--dropout", is_flag=True, help="A part of the probabilities is dropped, which each call says."),
        click.option("--dtype", default="bfloat16", show_default=True, help="bfloat16, float16 or float32."),
        click.option("--precision", help="Of products of float32: 3xtf32 (as good as float32) or tf32."),
        click.option("--deterministic", is_flag=True, help="A backward that repeats bit for bit."),
        click.option("--used", is_flag=True, help="Of the keys of each batch only the first seqused_k[b] are used."),
        click.option("--varlen", is_flag=True, help="Sequences of different lengths, packed one behind the other."),
        click.option("--shared-kv", is_flag=True, help="Values are the first columns of the keys: 576 and 512 of MLA."),
        click.option("--packed", type=int, default=1, help="Query heads that share a tile, on sm_90a: 2, 4 ... 64."),
        click.option("--length", type=click.Choice(LENGTHS[1:]), help="For few or many keys, where tiles differ."),
        click.option("--arch", default="sm_80", show_default=True, help=f"{', '.join(ARCHES)}."),
        click.option("--sram", type=ByteCount(), help="Pretend that a block has this much shared memory: 64KiB, 96K."),
        click.option(
            "--kernel",
            metavar="NAME",
            default=kernel_default,
            show_default=True,
            help=f"{', '.join(KERNELS)}; attention_forward and so on is understood too.",
        ),
    )

    def decorate(function: Callable) -> Callable:
        for option in reversed(made):
            function = option(function)
        return function

    return decorate


def parse_problem(
    file: str | None,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    top_left: bool,
    window: str | None,
    softcap: float | None,
    sinks: bool,
    dropout: bool,
    dtype: str,
    precision: str | None,
    deterministic: bool,
    used: bool,
    varlen: bool,
    shared_kv: bool,
    packed: int,
    length: str | None,
    arch: str,
    sram: int | None,
) -> tuple[Spec, Arch]:
    """The spec and the chip that the options stand for. Raises ValueError, with one sentence, for what is not one."""
    width = head_dim if head_dim_v is None else head_dim_v
    given: dict[str, Any] = {"causal": "top-left"} if top_left else {"causal": True} if causal else {}
    given |= {} if window is None else {"window": parse_window(window)}
    given |= {} if softcap is None else {"softcap": softcap}
    if file is not None and given:
        raise ValueError(f"{', '.join(given)} cannot be given beside {file}, whose `options` say all; change it there")
    causal, mask, score = variants.functions(**{"causal": False} | given) if file is None else functions_of(file)
    same = (head_dim, width, parse_dtype(dtype, precision), causal, deterministic)
    more: dict[str, Any] = {"mask": mask, "score": score, "varlen": varlen, "used": used, "dropout": dropout}
    more["shared_kv"] = shared_kv
    spec = Spec(*same, packed=packed, length=length or "", sinks=F32 if sinks else None, **more)
    check_kernels(spec)
    chip = parse_arch(arch)
    return spec, chip if sram is None else with_shared_memory(chip, sram)


def functions_of(file: str | Path) -> tuple[bool, Function | None, Function | None]:
    """`causal`, `mask` and `score` of the Spec that a file stands for. What cannot be traced is a ValueError too."""
    options = {"causal": False} | options_of(file)
    try:
        return variants.functions(**options)
    except TypeError as error:
        raise ValueError(f"`options` of {file}: {error}") from error


def options_of(file: str | Path) -> dict[str, Any]:
    """The `options` that a Python file defines, which `flashgen.attention` would take.

    Raises ValueError or OSError, with one sentence, where it defines none or others than these.
    """
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise FileNotFoundError(f"{file} is no Python file that exists; name one such as examples/masks/causal.py")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    options = getattr(module, "options", None)
    if not isinstance(options, dict):
        raise ValueError(f"{file} defines no `options`; write options = {{'mask_mod': ...}}")
    if unknown := options.keys() - set(FUNCTIONS):
        raise ValueError(f"`options` of {file} has {', '.join(sorted(unknown))}; it may have {', '.join(FUNCTIONS)}")
    return options


def parse_window(text: str) -> variants.Window:
    """The pair that LEFT,RIGHT stands for."""
    sides = text.replace(" ", "").split(",")
    if len(sides) != 2 or not all(side == "all" or side.isdigit() for side in sides):
        raise ValueError(f"window = {text!r} is not LEFT,RIGHT; write 512,0 or 512,all")
    left, right = (None if side == "all" else int(side) for side in sides)
    return left, right


def select(spec: Spec, arch: Arch, kernel: str) -> Iterator[Stages]:
    """The kernels that --kernel names, each as soon as it is planned.

    One that does not fit hides no other: PlanError is raised behind the last.
    """
    wanted = kernel.removeprefix("attention_")
    if wanted not in KERNELS:
        raise ValueError(f"kernel = {kernel!r} is not known; use one of {', '.join(KERNELS)}")
    unfit, there = [], []
    for make, names in ((build.forward, {"forward"}), (build.backward, set(KERNELS) - {"forward", "all"})):
        if wanted not in names and not (wanted == "all" and (make is build.forward or spec.differentiable)):
            continue
        try:
            planned = make(spec, arch)
        except PlanError as error:
            unfit.append(str(error))
            continue
        for stages in planned:
            there.append(stages.tile.name.removeprefix("attention_"))
            if wanted in ("all", there[-1]):
                yield stages
    if unfit:
        raise PlanError("; ".join(unfit))
    if wanted not in ("all", *there):
        raise ValueError(f"{spec} has no kernel {wanted} on {arch.name}; use one of {', '.join(there)}")
