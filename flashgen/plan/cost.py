"""What a candidate costs: the estimates that rank it, each a named function that tests compare with what is counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashgen.attention import lists
from flashgen.attention.varlen import ROW_BLOCK
from flashgen.ir.dtype import FP32, TF32, DType
from flashgen.ir.expr import (
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    I,
    J,
    Load,
    Random,
    Select,
    Unary,
    by_element,
    children,
    loads,
    variables,
    walk,
)
from flashgen.ir.graph import live_intervals, remembered
from flashgen.ir.nodes import Accumulate, Buffer, Copy, For, Gemm, Kernel, Let, Map, Space, Stmt, Window, name_of
from flashgen.ir.visit import statements
from flashgen.plan.arch import Arch
from flashgen.plan.wide import divides_output, is_wide

Layouts = Mapping[str, tuple[int, int]]
Sizes = Mapping[str, int]

# Addresses, loop counters and the operand fragments in flight, counted on compiled kernels: what the compiler takes
# beside the tiles before it spills. The forward's long products of shared operands keep more fragments in flight.
OVERHEAD_REGISTERS = {"attention_forward": 72, "attention_backward_aux": 96}
OTHER_OVERHEAD_REGISTERS = 40
ADDRESS_REGISTERS = 24  # beside what mask and score functions load, counted on compiled kernels
SPLIT_OVERHEAD_REGISTERS = 8  # more where four warps split the scores: each thread then copies and routes the most
WIDE_REGISTERS = 16  # more in the forward of keys wider than 256, three times as many where functions load
SPLIT_REGISTERS = 24  # more where operands are of float32, split into parts of TF32: those in flight
PARTS = {FP32: 2, TF32: 1}  # of TF32, of an operand
RANDOM_REGISTERS = 16  # more where random numbers are made, in the forward, and as many beside a score function
PLACE_REGISTERS = 8  # more where they are made for packed sequences: where a sequence lies is found, no argument
# Clocks of a step of four warps that nothing else of the block covers: barrier, first ldmatrix, quad shuffles. It grows
# with the warps, since the barrier waits for the slowest (fitted on an H200: two blocks of 4 warps beat one of 8).
STEP_LATENCY = 400
L2_BYTES_PER_CLOCK = 48
BOUNDED = ("tanh", "sigmoid", "sin", "cos")
SPECIAL = {"neg": 0, "abs": 0, "tanh": 2, "sigmoid": 2}  # instructions of the special function unit; others take one

# From so many operations on an element on, the compiler works on all elements before the next operation, which takes
# another tile. Counted on the examples, compiled by NVRTC 13.5; // and % by a constant are several instructions.
MANY_OPERATIONS = 7
OPERATIONS = {"floor_div": 4, "floor_mod": 5, "tanh": 2, "sigmoid": 2, "&": 0, "|": 0}


@dataclass(frozen=True)
class Step:
    """Work of one loop step of one block, in clocks of one multiprocessor for each unit."""

    flops: int
    matrix: float
    shared: float
    special: float
    arithmetic: float
    traffic: float

    def clocks(self, blocks: int, warps: int, waited: float = 1.0) -> float:
        """Units work beside each other as far as there are warps to keep them busy; latency is hidden by blocks.

        waited: the part of the copies with a single stage. Those are waited for in the step that issues them, others
        were issued a step earlier.
        """
        units = (self.matrix, self.shared, self.special, self.arithmetic, self.traffic)
        overlap = blocks * warps / 4
        longest = max(units)
        return longest + (sum(units) - longest) / (1 + overlap) + STEP_LATENCY * warps / 4 * (1 + waited) / blocks


def loop_statements(kernel: Kernel) -> Iterator[Stmt]:
    """Statements inside the kernel's loops; of a kernel without loops, all of them."""
    loops = [stmt for stmt in kernel.body if isinstance(stmt, For)]
    for stmt in statements(tuple(loops) or kernel.body):
        if not hasattr(stmt, "body"):
            yield stmt


@remembered
def _looped(kernel: Kernel) -> list[tuple[Stmt, int]]:
    """The loop's statements, each with the functions that it evaluates for an element."""
    return [(stmt, _functions(stmt)) for stmt in loop_statements(kernel)]


def _functions(stmt: Stmt) -> int:
    return special(stmt.expr) if isinstance(stmt, Map) else 0


def special(expr: Expr) -> int:
    """Instructions of the special function unit for an element; what is the same for all elements is computed once."""
    return sum(SPECIAL.get(node.op, 1) for node in walk(expr) if isinstance(node, Unary) and by_element(node))


@remembered
def on_scores(kernel: Kernel) -> tuple[int, bool]:
    """Special functions of the score function for an element; and whether there is one, or a mask beyond causal."""
    maps = [stmt.expr for stmt, _ in _looped(kernel) if isinstance(stmt, Map) and stmt.dst == "s"]
    comparisons = sum(isinstance(node, Compare) for expr in maps for node in walk(expr))
    return max(map(special, maps), default=0), len(maps) > 1 or comparisons > 2


def takes_functions(kernel: Kernel) -> bool:
    """True for a kernel with a score function, a mask beyond causal, or random numbers."""
    return on_scores(kernel) != (0, False) or draws(kernel)


@remembered
def scores(kernel: Kernel) -> bool:
    """True for a kernel with a score function."""
    return sum(isinstance(stmt, Map) and stmt.dst == "s" for stmt, _ in _looped(kernel)) > 1


@remembered
def rises(kernel: Kernel) -> bool:
    """True where scores may rise with every block of keys: the score function has the number of the key in it.

    Where that is only an array's index, part of a condition or of what is bounded, it does not count.
    """
    return any(_has_key(stmt.expr) for stmt, _ in _looped(kernel) if isinstance(stmt, Map) and stmt.dst == "s")


def _has_key(expr: Expr) -> bool:
    if isinstance(expr, Load | Compare) or (isinstance(expr, Unary) and expr.op in BOUNDED):
        return False
    parts = (expr.x, expr.y) if isinstance(expr, Select) else children(expr)
    return expr == J or any(_has_key(part) for part in parts)


@remembered
def draws(kernel: Kernel) -> bool:
    """True for a kernel with random numbers."""
    return any(
        isinstance(node, Random) for stmt, _ in _looped(kernel) if isinstance(stmt, Map) for node in walk(stmt.expr)
    )


def draws_in_sequences(kernel: Kernel) -> bool:
    """True for a kernel with random numbers for packed sequences."""
    return kernel.axes[0].name == ROW_BLOCK.name and draws(kernel)


@remembered
def _operations(kernel: Kernel) -> list[tuple[int, int, int]]:
    """Of each statement on the scores: operations on an element, and values that differ by row or by column alone."""
    found = []
    for stmt, _ in _looped(kernel):
        if isinstance(stmt, Map) and stmt.dst == "s":
            nodes = {node: variables(node) & {I.name, J.name} for node in walk(stmt.expr)}
            counted = [node for node, names in nodes.items() if len(names) == 2 and type(node) in (Unary, Binary, Cast)]
            computed = {node for node in nodes if len(nodes[node]) == 1 and _kept(node)}
            inner = {part for node in computed for part in walk(node) if part != node}
            axes = [next(iter(nodes[node])) for node in computed - inner]
            operations = sum(OPERATIONS.get(node.op, 1) if isinstance(node, Unary | Binary) else 1 for node in counted)
            found.append((operations, axes.count(I.name), axes.count(J.name)))
    return found


def _kept(expr: Expr) -> bool:
    """True for what is worth a register: a sum or a truth is made again where it is needed, a load counts elsewhere."""
    if isinstance(expr, Compare) or (isinstance(expr, Binary) and expr.op in "&|"):
        return False
    loads = any(isinstance(part, Load) for part in walk(expr))
    divides = any(isinstance(part, Binary) and part.op in ("floor_div", "floor_mod") for part in walk(expr))
    return (divides or any(isinstance(part, Unary) for part in walk(expr))) and not loads


def function_registers(kernel: Kernel, sizes: Sizes, layout: tuple[int, int]) -> int:
    """What the arithmetic of masks and score functions takes of a thread beside tiles: for the statement with the most.

    layout: warps along rows and columns of the scores, as in `loaded_values`.
    """
    rows, cols = (-(-sizes[dim] // along) for dim, along in zip(kernel.buffer("s").shape, layout, strict=True))
    tile = rows * cols // 32
    return max(
        (tile if operations >= MANY_OPERATIONS else 0) + by_row * -(-rows // 8) + by_col * -(-cols // 4)
        for operations, by_row, by_col in _operations(kernel) or [(0, 0, 0)]
    )


@remembered
def _loads(kernel: Kernel) -> list[set[str]]:
    """By what each element differs that statements load from arrays of functions: by rows i, columns j or both."""
    found = []
    for stmt, _ in _looped(kernel):
        expr = stmt.expr if isinstance(stmt, Map) else Const(0)
        loads = {node for node in walk(expr) if isinstance(node, Load) and kernel.buffer(node.buffer).by_element}
        inner = {node for load in loads for index in load.index for node in walk(index)}  # become addresses at once
        found += [variables(load) & {I.name, J.name} for load in loads - inner]
    return found


def loads_limits(kernel: Kernel) -> bool:
    """True where it is loaded from memory how far loops go: by lists of blocks, or the lengths of sequences."""
    return any(isinstance(stmt, Let) and loads(stmt.value) for stmt in kernel.body)


def listed(kernel: Kernel) -> bool:
    """True where loops walk lists of blocks."""
    return any(buffer.name in (lists.KEYS.name, lists.QUERIES.name) for buffer in kernel.buffers)


def loaded_values(kernel: Kernel, sizes: Sizes, layout: tuple[int, int]) -> int:
    """Elements that masks and score functions load for a thread: the compiler asks for all before it uses any.

    layout: warps along rows and columns of the scores; a warp's rows lie in 8 groups of lanes, its columns in 4.
    """
    if not _loads(kernel):
        return 0
    rows, cols = (-(-sizes[dim] // along) for dim, along in zip(kernel.buffer("s").shape, layout, strict=True))
    many = {I.name: -(-rows // 8), J.name: -(-cols // 4)}
    return sum(math.prod(many[name] for name in names) for names in _loads(kernel))


def loaded_registers(kernel: Kernel, sizes: Sizes, layout: tuple[int, int], addresses: int) -> int:
    """Registers for these where a warpgroup computes; with those for addresses where these differ by row and column."""
    one_by_one = any(len(names) == 2 for names in _loads(kernel))
    return loaded_values(kernel, sizes, layout) + addresses * one_by_one


def step(kernel: Kernel, arch: Arch, sizes: Sizes, layouts: Layouts, warps: int) -> Step:
    """The work of one step of the kernel's innermost loop."""
    flops = matrix = shared_bytes = exponentials = elements = traffic = 0
    for stmt, functions in _looped(kernel):
        if isinstance(stmt, Gemm):
            copies = _copies(stmt.acc, layouts, warps)
            flops += gemm_flops(kernel, stmt, sizes)
            matrix += copies * gemm_flops(kernel, stmt, sizes) * instructions(kernel.buffer(stmt.a).dtype)
            shared_bytes += copies * gemm_shared_bytes(kernel, stmt, sizes, layouts)
        elif isinstance(stmt, Map):
            size = _elements(kernel.buffer(stmt.dst), sizes) * _copies(stmt.dst, layouts, warps)
            elements += size
            exponentials += size * functions
        elif isinstance(stmt, Copy) and isinstance(stmt.src, Window):
            traffic += _bytes(kernel.buffer(name_of(stmt.dst)), sizes)
        elif isinstance(stmt, Copy):
            shared_bytes += _bytes(kernel.buffer(name_of(stmt.dst)), sizes)
        elif isinstance(stmt, Accumulate):
            traffic += 2 * _bytes(kernel.buffer(stmt.src), sizes)
    return Step(
        flops=flops,
        matrix=matrix / 2 / arch.matrix_rate,
        shared=(shared_bytes + traffic) / arch.shared_bandwidth,
        special=exponentials / arch.exp_rate,
        arithmetic=elements / 64,
        traffic=traffic / L2_BYTES_PER_CLOCK,
    )


def _copies(tile: str, layouts: Layouts, warps: int) -> int:
    """Warps that compute each part of a tile."""
    return warps // math.prod(layouts[tile]) if tile in layouts else 1


def instructions(dtype: DType) -> int:
    """How many times as long as one of 16 bits a product of such operands takes: TF32 has half the rate."""
    return {FP32: 6, TF32: 2}.get(dtype, 1)


def gemm_flops(kernel: Kernel, stmt: Gemm, sizes: Sizes) -> int:
    """2 m n k."""
    a = kernel.buffer(stmt.a).shape
    depth = sizes[a[0] if stmt.transpose_a else a[1]]
    return 2 * _elements(kernel.buffer(stmt.acc), sizes) * depth


def gemm_shared_bytes(kernel: Kernel, stmt: Gemm, sizes: Sizes, layouts: Layouts) -> int:
    """Bytes that the warps together read from shared memory: every warp its rows of A and its columns of B."""
    a, b = kernel.buffer(stmt.a), kernel.buffer(stmt.b)
    along_rows, along_cols = layouts[stmt.acc]
    routed = a.space is Space.REGISTER and (layouts[stmt.a][0] != along_rows or layouts[stmt.a][1] != 1)
    from_shared = a.space is Space.SHARED or routed
    read_a = _bytes(a, sizes) * along_cols if from_shared else 0
    read_b = _bytes(b, sizes)
    if stmt.columns:
        read_b = read_b * sizes[stmt.columns] // sizes[b.shape[1]]
    return read_a + read_b * along_rows


def accumulator_registers(kernel: Kernel, sizes: Sizes, threads: int, layouts: Layouts) -> int:
    """Registers of one thread for tiles and row vectors where most of them are alive together."""
    spans = live_intervals(kernel, Space.REGISTER)
    weights = {name: _registers(kernel.buffer(name), sizes, threads, layouts) for name in spans}
    last = max((end for _, end in spans.values()), default=0)
    return max(
        (sum(weights[name] for name, (start, end) in spans.items() if start <= point < end) for point in range(last)),
        default=0,
    )


def registers(kernel: Kernel, sizes: Sizes, threads: int, layouts: Layouts) -> int:
    """The estimate for one thread: tiles, row vectors and what the compiler needs beside them."""
    overhead = OVERHEAD_REGISTERS.get(kernel.name, OTHER_OVERHEAD_REGISTERS)
    if layouts.get("s") == (2, 2):
        overhead += SPLIT_OVERHEAD_REGISTERS
    if kernel.name == "attention_forward" and draws(kernel):
        overhead += RANDOM_REGISTERS * (2 if scores(kernel) else 1)
    overhead += PLACE_REGISTERS * draws_in_sequences(kernel)
    loaded = loaded_values(kernel, sizes, layouts["s"]) if "s" in layouts else 0
    overhead += loaded + min(loaded, ADDRESS_REGISTERS)
    if kernel.name == "attention_forward" and is_wide(sizes) and not divides_output(kernel, sizes):
        overhead += WIDE_REGISTERS * (3 if loaded else 1)
    overhead += split_registers(kernel, sizes, layouts)
    return accumulator_registers(kernel, sizes, threads, layouts) + overhead


def split_registers(kernel: Kernel, sizes: Sizes, layouts: Layouts) -> int:
    """What products of float32 take of a thread: the parts of A, of its whole depth where sums go on from step to step.

    One part of a register operand lies where that lay.
    """
    beside = SPLIT_REGISTERS + (2 * RANDOM_REGISTERS if draws(kernel) else 0)
    found = [0]
    for stmt, _ in _looped(kernel):
        if isinstance(stmt, Gemm) and kernel.buffer(stmt.a).dtype in PARTS:
            kept = 0
            if stmt.accumulate:
                along, across = layouts[stmt.acc]
                in_place = kernel.space(stmt.a) is Space.REGISTER and across == 1
                kept = PARTS[kernel.buffer(stmt.a).dtype] - in_place
                kept *= _elements(kernel.buffer(stmt.a), sizes) // along // 32
            found.append(beside + kept)
    return max(found)


def _registers(buffer: Buffer, sizes: Sizes, threads: int, layouts: Layouts) -> int:
    if len(buffer.shape) == 2:
        holding = 32 * math.prod(layouts[buffer.name]) if buffer.name in layouts else threads
        return -(-_bytes(buffer, sizes) // 4 // holding)
    rows = next((layout[0] for layout in layouts.values()), 1)
    return -(-sizes[buffer.shape[0]] // rows // 8)


def resident_blocks(arch: Arch, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that one multiprocessor holds at a time."""
    by_registers = arch.registers // (threads * min(arch.max_registers + 1, -(-registers // 8) * 8))
    by_shared = arch.shared_per_multiprocessor // (shared_bytes + 1024)
    return max(0, min(by_registers, by_shared, arch.max_threads // threads))


def traffic_bytes(kernel: Kernel, sizes: Sizes, steps: int) -> int:
    """Bytes that one block reads from global memory into shared memory: its own tiles once, the loop's each step."""
    looped = {id(stmt) for stmt in loop_statements(kernel)} if any(isinstance(s, For) for s in kernel.body) else set()
    total = 0
    for stmt in statements(kernel.body):
        if isinstance(stmt, Copy) and isinstance(stmt.src, Window) and not isinstance(stmt.dst, Window):
            total += _bytes(kernel.buffer(name_of(stmt.dst)), sizes) * (steps if id(stmt) in looped else 1)
    return total


def _elements(buffer: Buffer, sizes: Sizes) -> int:
    count = 1
    for dim in buffer.shape:
        count *= sizes[dim]
    return count


def _bytes(buffer: Buffer, sizes: Sizes) -> int:
    return _elements(buffer, sizes) * buffer.dtype.bytes
