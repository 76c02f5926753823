"""The wgmma instructions of a kernel, spelled: one device function for each shape and kind of operand.

An asm statement names every accumulator register, so its text depends on the width of the tile; all else of the
Hopper kernels is in templates/.
"""

from __future__ import annotations

from flashgen.emit.names import Fields, Names, width
from flashgen.emit.view_sm90 import instruction
from flashgen.ir.dtype import BF16
from flashgen.ir.nodes import Kernel, Space
from flashgen.ir.visit import statements
from flashgen.machine.sm90 import Wgmma
from flashgen.spec import Spec

# The high word of a descriptor: 1024 bytes from 8 rows to the next in units of 16, and a swizzle of 128 bytes (bit 62).
DESCRIPTOR_HIGH = 1024 // 16 | 1 << 30


def products(kernel: Kernel, names: Names, spec: Spec) -> list[Fields]:
    """The distinct instructions, in the order of their first use."""
    found: dict[str, Fields] = {}
    for stmt in statements(kernel.body):
        if isinstance(stmt, Wgmma):
            found.setdefault(instruction(stmt, names), _product(kernel, names, spec, stmt))
    return list(found.values())


def _product(kernel: Kernel, names: Names, spec: Spec, stmt: Wgmma) -> Fields:
    n = width(stmt, names)
    count = n // 2
    in_registers = isinstance(stmt.a, str) and kernel.space(stmt.a) is Space.REGISTER
    a = ["a0", "a1", "a2", "a3"] if in_registers else ["a", "a_step"]
    first = count + len(a)
    low_words = {"b_desc": first} if in_registers else {"a_desc": count, "b_desc": first}
    return {
        "name": instruction(stmt, names),
        "n": n,
        "cols": n // 4,
        "type": "bf16" if spec.dtype == BF16 else "f16",
        "a_parameters": ", ".join(f"uint32 {name}" for name in a),
        "registers": _lines([f"%{index}" for index in range(count)], 16),
        "a": f"{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}" if in_registers else "a_desc",
        "descriptors": ", ".join(low_words),
        # added here, or the sums of all steps would be computed ahead of a loop, and kept in registers
        "moves": [
            f"add.u32 low, %{low}, %{low + 1}; mov.b64 {name}, {{low, {DESCRIPTOR_HIGH}}};"
            for name, low in low_words.items()
        ],
        "flag": f"%{first + 2}",
        # scale a, scale b; transposes of the operands in shared memory: set where depth is not the contiguous dimension
        "modifiers": ", ".join(
            ["1", "1", *(() if in_registers else (str(int(stmt.transpose_a)),)), "0" if stmt.transpose_b else "1"]
        ),
        "outputs": _lines(
            [f'"+f"(acc[{i}][{2 * j + c}])' for j in range(n // 8) for i in range(2) for c in range(2)], 8
        ),
        "inputs": ", ".join(f'"r"({name})' for name in (*a, "b", "b_step", "accumulate")),
    }


def _lines(items: list[str], each: int) -> list[str]:
    """A list over several lines, with its commas."""
    rows = [", ".join(items[at : at + each]) for at in range(0, len(items), each)]
    return [f"{row}, " for row in rows[:-1]] + rows[-1:]
