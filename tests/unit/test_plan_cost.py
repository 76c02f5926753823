"""Estimates against what the tile interpreter counts, and the blocks of a grid against the rows."""

import numpy as np
import pytest
from verdicts import SMALLEST

from flashgen.attention import backward, forward
from flashgen.interp import tile
from flashgen.ir.expr import evaluate as value_of
from flashgen.ir.nodes import Gemm, Space
from flashgen.plan import cost
from flashgen.plan.arch import KIB, parse_arch
from flashgen.spec import Spec

BLOCKS = {"block_q": 32, "block_kv": 16, "head_dim": 16, "head_dim_v": 32}
SEQLEN_Q, SEQLEN_K, HEADS, GROUP = 96, 64, 4, 2


def counted(kernel, spec):
    """What one block moves and computes, by the interpreter's counter, and its loop steps."""
    scalars = {"seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K, "heads": HEADS, "heads_kv": HEADS // GROUP, "group": GROUP}
    scalars |= {"batches": 1, "scale": 0.25, "scale_log2": 0.25}
    lengths = {"seqlen_q_padded": SEQLEN_Q, "batches": 1}
    arrays = {}
    for buffer in kernel.buffers:
        if buffer.space is Space.GLOBAL:
            heads = HEADS // GROUP if buffer.name in ("k", "v", "dk", "dv") else HEADS
            dims = {**BLOCKS, **scalars, **lengths, "heads": heads}
            arrays[buffer.name] = np.zeros([dims[dim] for dim in buffer.shape], np.float32)
    counter = tile.Counter()
    tile.run(kernel, BLOCKS, arrays, scalars, counter)
    blocks = np.prod([value_of(axis.extent, {**BLOCKS, **scalars}) for axis in kernel.axes])
    steps = SEQLEN_K // BLOCKS["block_kv"] if "kv_block" not in {axis.name for axis in kernel.axes} else None
    return counter, int(blocks), steps or GROUP * SEQLEN_Q // BLOCKS["block_q"]


SPEC = Spec(BLOCKS["head_dim"], BLOCKS["head_dim_v"])
MAKERS = (forward.forward, backward.delta, backward.backward, backward.convert_dq, backward.backward_dq)


@pytest.mark.parametrize("make", MAKERS)
def test_traffic_is_what_the_interpreter_counts(make):
    kernel = make(SPEC)
    counter, blocks, steps = counted(kernel, SPEC)
    assert cost.traffic_bytes(kernel, BLOCKS, steps) * blocks == counter.global_bytes_read > 0


@pytest.mark.parametrize("make", [forward.forward, backward.backward, backward.backward_dq])
def test_flops_are_what_the_interpreter_counts(make):
    kernel = make(SPEC)
    counter, blocks, steps = counted(kernel, SPEC)
    products = [stmt for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm)]
    flops = sum(cost.gemm_flops(kernel, product, BLOCKS) for product in products)
    assert flops * steps * blocks == counter.flops > 0
    layouts = {item.name: (2, 1) for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2}
    assert cost.step(kernel, SMALLEST, BLOCKS, layouts, 2).flops == flops


def test_products_read_their_operands_once_a_warp_that_needs_them():
    """s = q k^T on 2 x 4 warps: each reads its 16 rows of q (32 bytes each) and its 4 columns of k."""
    kernel = forward.forward(SPEC)
    product = next(stmt for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm) and stmt.acc == "s")
    assert cost.gemm_shared_bytes(kernel, product, BLOCKS, {"s": (2, 4)}) == 8 * (16 * 32 + 4 * 32)


@pytest.mark.parametrize("make", [forward.forward, backward.backward, backward.backward_dq])
def test_registers_hold_at_least_the_accumulators_of_the_loop(make):
    kernel = make(SPEC)
    tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
    small, large = (
        cost.accumulator_registers(kernel, BLOCKS, 32 * warps, dict.fromkeys(tiles, (warps, 1))) for warps in (4, 2)
    )
    carried = {stmt.acc for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm) and stmt.accumulate}
    elements = sum(BLOCKS[kernel.buffer(acc).shape[0]] * BLOCKS[kernel.buffer(acc).shape[1]] for acc in (*carried, "s"))
    assert elements // 64 <= large and elements // 128 <= small < large
    every = sum(np.prod([BLOCKS[d] for d in b.shape]) for b in kernel.buffers if b.space is Space.REGISTER)
    assert large < every, "tiles that are never alive together are not added up"


def test_resident_blocks_are_bounded_by_each_limit():
    arch = parse_arch("sm_80")
    assert cost.resident_blocks(arch, 128, 128, 10) == 4  # registers: 65536 / (128 * 128)
    assert cost.resident_blocks(arch, 128, 32, 40 * KIB) == 4  # shared memory: 164 / 41
    assert cost.resident_blocks(arch, 1024, 32, 0) == 2  # threads: 2048 / 1024
    assert cost.resident_blocks(arch, 128, 32, arch.shared_per_multiprocessor) == 0


def test_a_grid_axis_covers_every_row():
    """ceil_div of the nests: the last block is ragged, no row is left out."""
    for make in MAKERS:
        axis = make(SPEC).axes[0]
        block = "block_kv" if axis.name == "kv_block" else "block_q"
        length = "seqlen_k" if axis.name == "kv_block" else "seqlen_q"
        for rows in (0, 1, 31, 32, 33, 64):
            blocks = value_of(axis.extent, {length: rows, block: 32})
            assert blocks * 32 >= rows > (blocks - 1) * 32
