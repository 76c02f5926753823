"""Kernels of attention at both levels, and small ones made for the purpose."""

from flashgen import build
from flashgen.attention import backward, forward
from flashgen.ir.dtype import BF16, F32, I32
from flashgen.ir.expr import Const, Var
from flashgen.ir.nodes import Axis, Buffer, Kernel, Level, Scalar, Space, Window
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

SPECS = [Spec(64, 32, causal=True), Spec(32, 32, deterministic=True, aligned=False)]
NESTS = [make(spec) for spec in SPECS for make in (forward.forward, backward.delta, backward.backward)]
NESTS += [backward.convert_dq(SPECS[0]), backward.backward_dq(SPECS[1])]
STAGES = [stages for spec in SPECS for stages in build.everything(spec, parse_arch("sm_90")).values()]
KERNELS = [*NESTS, *(stages.machine for stages in STAGES)]
named = {"ids": lambda kernel: f"{kernel.name}-{kernel.level.name}"}


def matrix(name, *shape, space=Space.REGISTER, dtype=F32):
    return Buffer(name, shape, dtype, space)


def kernel_of(*body, level=Level.TILE, extra=()):
    """A kernel with x, y: r x c and v, w: r in registers, t: r x c shared, and the global g."""
    buffers = [matrix(name, "r", "c") for name in ("x", "y", "z")] + [matrix(name, "r") for name in ("v", "w")]
    buffers += [matrix("sq", "r", "r"), matrix("h", "r", "c", dtype=BF16)]
    buffers += [matrix("t", "r", "c", space=Space.SHARED, dtype=BF16), matrix("tv", "r", space=Space.SHARED)]
    buffers += [matrix("g", "batches", "heads", "rows", "c", space=Space.GLOBAL, dtype=BF16)]
    scalars = (Scalar("rows", I32), Scalar("scale", F32))
    return Kernel("small", level, scalars, (Axis("block", Var("rows")),), (*buffers, *extra), body)


def row(start):
    return Window("g", (Const(0), Const(0), start))
