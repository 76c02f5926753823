"""Kernels of attention lowered to sm80, with the stages of the planner or chosen ones, and how to look into them."""

from dataclasses import replace
from functools import cache

from flashgen import build, lower
from flashgen.attention import backward, forward
from flashgen.ir.nodes import For, Space
from flashgen.ir.visit import statements
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch, with_shared_memory
from flashgen.plan.plan import Candidate
from flashgen.spec import Spec

ROOMY = with_shared_memory(parse_arch("sm_80"), 512 * 1024)
SPEC = Spec(64, 32, causal=True)
ALL = build.everything(SPEC, parse_arch("sm_90")) | build.everything(
    replace(SPEC, deterministic=True, aligned=False), parse_arch("sm_86")
)
DEPTHS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3)]
PIPELINED = {
    "forward": forward.forward(Spec(64, 64, causal=True)),
    "backward": backward.backward(Spec(64, 64, causal=True)),
    "backward_dq": backward.backward_dq(Spec(64, 64, deterministic=True)),
}


def staged_plan(kernel, spec, first, second, split=1):
    """A small plan with a chosen number of stages; it fits by its room."""
    tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
    layouts = dict.fromkeys(tiles, (4 // split, split))
    blocks = {"block_q": 64, "block_kv": 64}
    depths = {"k_tile": first, "v_tile": second}
    if kernel.name == "attention_backward":
        depths = {"q_tile": first, "lse_tile": first, "dout_tile": second, "delta_tile": second}
        layouts["dq_acc"] = (4, 1)
    candidate = Candidate(tuple(blocks.items()), 4, tuple(depths.items()), tuple(layouts.items()))
    assert planner.judge(kernel, ROOMY, planner.head_dims(spec, ROOMY), candidate).rejection == ""
    return planner.make(kernel, spec, ROOMY, candidate)


def up_to(last, kernel, plan):
    """The kernel after a pass of the list."""
    for step in (*lower.TILE_PASSES, *lower.SM80_PASSES):
        kernel = step(kernel, plan)
        if step is last:
            return kernel
    raise AssertionError(f"{last} is no pass")


def find(kernel, kind, *wanted):
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, kind) and all(test(stmt) for test in wanted)]


def the_loop(kernel):
    (found,) = [stmt for stmt in kernel.body if isinstance(stmt, For)]
    return found


@cache
def machine_of(nest, depth, split=1):
    kernel = PIPELINED[nest]
    plan = staged_plan(kernel, Spec(64, 64), *depth, split=split)
    return lower.run(kernel, plan), plan
