"""Passes from TILE to MACHINE; `run` is their order."""

from __future__ import annotations

from collections.abc import Callable

from flashgen.ir import verify
from flashgen.ir.nodes import Kernel, Level
from flashgen.lower import barriers, loops, masks, operands, pipeline, random, reduction, sm80, transpose
from flashgen.lower.sm90 import (
    bulk,
    descriptors,
    direction,
    divide,
    guess,
    lengths,
    listed,
    matrices,
    order,
    overlap,
    own,
    persist,
    roles,
    select,
    stages,
    vectors,
    waits,
)
from flashgen.machine.verify import machine as verify_machine
from flashgen.plan.plan import Plan

Pass = Callable[[Kernel, Plan], Kernel]

TILE_PASSES: tuple[Pass, ...] = (masks.skip_blocks, masks.guard_masks)
SM80_PASSES: tuple[Pass, ...] = (
    transpose.transpose_sums,
    loops.flatten,
    operands.through_shared,
    sm80.select,
    random.share_counters,
    reduction.combine_after_loop,
    pipeline.stage_copies,
    barriers.insert,
    barriers.drop_redundant,
)
SM90_PASSES: tuple[Pass, ...] = (
    masks.mask_sides,
    direction.last_block_first,
    transpose.transpose_sums,
    select.instructions,
    lengths.number_rows,
    matrices.load_matrices,
    random.share_counters,
    bulk.add_in_bulk,
    bulk.heads_side_by_side,
    loops.number,
    reduction.combine_after_loop,
    divide.divide_work,
    persist.take_tiles,
    stages.stage_tiles,
    order.join_vectors,
    roles.split_roles,
    persist.hand_over_tiles,
    own.pass_over_others,
    select.isolate_columns,
    order.order_products,
    overlap.overlap,
    guess.guess_maximum,
    overlap.take_turns,
    waits.guard_loads,
    waits.guard_reads,
    waits.wait_products,
    waits.release_tiles,
    waits.guard_output,
    waits.guard_exchange,
    waits.guard_handovers,
    waits.keep_in_cache,
    persist.settle_lengths,
    descriptors.describe,
    listed.read_lists,
    vectors.hold_vectors,
)
FAMILIES: dict[str, tuple[Pass, ...]] = {"sm80": SM80_PASSES, "sm90": SM90_PASSES}


def tile(kernel: Kernel) -> Kernel:
    """The TILE kernel with its loops tightened and its masks guarded: needs no plan, so the CPU runs this form."""
    for step in (masks.skip_blocks, masks.guard_masks):
        kernel = step(kernel)
    verify.tile(kernel)
    return kernel


def run(kernel: Kernel, plan: Plan, watch: Callable[[str, Kernel], None] = lambda name, kernel: None) -> Kernel:
    """The MACHINE kernel; each pass is shown to `watch` under its name.

    Verified are the TILE kernel after each pass that leaves it one, and the MACHINE kernel once, after the last pass:
    between the passes that select instructions and that place barriers it is not yet free of hazards.
    """
    for step in (*TILE_PASSES, *FAMILIES[plan.arch.family]):
        kernel = step(kernel, plan) if step not in (masks.skip_blocks, masks.guard_masks) else step(kernel)
        if kernel.level is Level.TILE:
            verify.tile(kernel)
        watch(step.__name__, kernel)
    verify_machine(kernel, plan)
    return kernel
