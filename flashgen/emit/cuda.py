"""Emission: a verified MACHINE kernel becomes CUDA text that reads like the algorithm."""

from __future__ import annotations

import re
from functools import partial

from flashgen.emit.env import environment, header
from flashgen.emit.names import Fields, Names, camel
from flashgen.emit.source import Source
from flashgen.emit.view import statement
from flashgen.emit.wgmma import products
from flashgen.ir.dtype import OPERANDS, DType
from flashgen.ir.nodes import Buffer, For, If, Kernel, Let, Note, Space, Stmt, name_of
from flashgen.ir.visit import Body, statements
from flashgen.machine import base
from flashgen.machine.sm90_facts import mapped
from flashgen.plan.plan import Plan
from flashgen.plan.smem import SWIZZLE_ALIGNMENT
from flashgen.spec import Spec

STRUCTURE = {For: "for_loop", If: "if_block", Let: "let", Note: "only_note"}


def cuda(kernel: Kernel, plan: Plan, spec: Spec) -> Source:
    """The CUDA of one kernel. The text depends on its arguments alone: no time, no path, no order of a set."""
    names = Names(kernel, plan)
    headers = _headers(kernel, plan, spec)
    render = partial(
        environment().get_template("kernel.cu.jinja").render,
        kernel=kernel,
        spec=spec,
        plan=plan,
        plan_lines=plan.text().splitlines(),
        headers=headers,
        grid=_grid(kernel, names),
        tensors=_tensors(kernel),
        scalars=[{"type": scalar.dtype.cuda, "name": scalar.name} for scalar in kernel.scalars],
        shared=_shared(kernel, plan),
        fragments=_fragments(kernel, names),
        registers=_registers(kernel, names),
        products=products(kernel, names, spec),
        barriers=_barriers(plan),
        launch_threads="THREADS + PRODUCER_THREADS" if plan.producer_warps else "THREADS",
        alignment=max([16, *(SWIZZLE_ALIGNMENT for place in plan.shared if place.swizzled)]),
        body=_body(kernel.body, names),
    )
    used = _words(render(constants=[]))
    text = render(constants=[item for item in _constants(kernel, plan, spec) if item["name"] in used])
    return Source(kernel.name, indent(text), tuple((f"flashgen/{name}.cuh", header(f"{name}.cuh")) for name in headers))


def _headers(kernel: Kernel, plan: Plan, spec: Spec) -> tuple[str, ...]:
    """What the text includes: a cubin is cached by all of it, so that what few kernels need is apart."""
    by_element = any(isinstance(stmt, base.StoreElements | base.AddElements) for stmt in statements(kernel.body))
    more = ("elements",) * by_element + ("tf32",) * (spec.dtype.bytes != 2)
    return ("common", plan.arch.family, *more)


def _words(text: str) -> set[str]:
    """The words of a text without its comments."""
    return {word for line in text.splitlines() for word in re.findall(r"\w+", line.split("//")[0])}


def _body(body: Body, names: Names) -> str:
    return "".join(_render(stmt, names) for stmt in body)


def _render(stmt: Stmt, names: Names) -> str:
    """One statement through its macro."""
    name = STRUCTURE.get(type(stmt)) or stmt.NAME  # type: ignore[attr-defined]
    module = environment().get_template(f"stmt/{getattr(stmt, 'FAMILY', 'common')}.jinja").module
    view = statement(stmt, names, _body(getattr(stmt, "body", ()), names))
    remark = environment().get_template("stmt/common.jinja").module.remark(view)  # type: ignore[attr-defined]
    return f"{remark}{getattr(module, name)(view)}"


def _grid(kernel: Kernel, names: Names) -> list[Fields]:
    """The grid axes, each a dimension of the launch: special registers, which the compiler reads again at no cost."""
    axes: list[Fields] = []
    for axis, dimension in zip(kernel.axes, "xyz", strict=False):
        index = f"blockIdx.{dimension}"
        last = f"{axis.name}_count - 1 - {index}"
        axes.append(
            {
                "name": axis.name,
                "count": f"{axis.name}_count" if axis.longest_first else "",
                "extent": names.uniform(axis.extent),
                "index": last if axis.longest_first else index,
            }
        )
    return axes


def _constants(kernel: Kernel, plan: Plan, spec: Spec) -> list[Fields]:
    """Every number that the kernel may use, once."""
    step = 32 // spec.dtype.bytes
    numbers = [
        ("THREADS", plan.computing_threads, f"{plan.computing_warps} warps"),
        ("MIN_BLOCKS", plan.min_blocks, "blocks a multiprocessor"),
        ("PRODUCER_THREADS", 32 * plan.producer_warps, "of which one loads"),
        ("UNROLLED_DEPTH", plan.unrolled_depth, f"steps of {step} in depth, of products from shared memory"),
    ]
    numbers += [(name.upper(), size, "") for name, size in plan.dims]
    true = {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v}
    used = {dim for buffer in kernel.buffers for dim in buffer.shape}
    numbers += [(f"TRUE_{name.upper()}", size, "before padding") for name, size in true.items() if name in used]
    if "head_dim" in used and "head_dim" not in plan.sizes:
        raise ValueError(f"{kernel.name}: head_dim is used by a tensor but by no tile")
    numbers.append(("REDUCTION_WIDTH", 4 if plan.arch.vector_reductions else 1, "floats in one atomic addition"))
    return [{"name": name, "value": value, "note": note} for name, value, note in numbers]


def _tensors(kernel: Kernel) -> list[Fields]:
    """Global arrays as members of the argument struct, in the order in which the launcher packs them."""
    by_map = mapped(kernel)
    written = {name_of(place) for stmt in statements(kernel.body) for place in stmt.writes()}
    return [
        {
            "declaration": f"{_tensor_type(buffer, by_map, written)} {buffer.name}",
            "shape": ", ".join(buffer.shape) or "one",
        }
        for buffer in kernel.buffers
        if buffer.space is Space.GLOBAL
    ]


def _tensor_type(buffer: Buffer, by_map: set[str], written: set[str]) -> str:
    if buffer.name in by_map:
        return "TensorMap"
    if buffer.by_element:
        kind = "Target" if buffer.name in written else "Array"
        return f"{kind}<{buffer.dtype.cuda}, {len(buffer.shape)}>"
    if not buffer.shape:
        return f"{buffer.dtype.cuda}*"
    kind = "Tensor" if len(buffer.shape) == 4 else "Vector"
    return f"{kind}<{_element(buffer.dtype)}>"


def _element(dtype: DType) -> str:
    return "element" if dtype in OPERANDS else dtype.cuda


def _shared(kernel: Kernel, plan: Plan) -> list[Fields]:
    result: list[Fields] = []
    for place in plan.shared:
        buffer = kernel.buffer(place.buffer)
        tile = len(buffer.shape) == 2 and buffer.dtype in OPERANDS
        size = buffer.dtype.bytes
        result.append(
            {
                "name": buffer.name,
                "type": camel(buffer.name),
                "is_tile": tile,
                "is_panels": place.swizzled,
                "element": buffer.dtype.cuda,
                "shape": ", ".join(dim.upper() for dim in buffer.shape),
                "layout": place.row_bytes if size == 2 else f"{place.row_bytes}, {size}",
                "offset": place.offset,
                "constant": f"{buffer.name.upper()}_OFFSET",
            }
        )
    return result


def _barriers(plan: Plan) -> list[Fields]:
    """The mbarriers behind the tiles."""
    return [{"name": name, "constant": f"{name.upper()}_OFFSET", "offset": offset} for name, offset, _ in plan.barriers]


def _fragments(kernel: Kernel, names: Names) -> list[Fields]:
    """Layout types, each once."""
    seen: dict[str, Fields] = {}
    for buffer in kernel.buffers:
        if buffer.space is Space.REGISTER and len(buffer.shape) == 2:
            kind = names.fragments[buffer.name]
            shape = ", ".join(dim.upper() for dim in buffer.shape)
            layout, warps = _layout(kernel, buffer, names.plan)
            seen.setdefault(kind, {"type": kind, "shape": shape, "layout": layout, "warps": ", ".join(map(str, warps))})
    return list(seen.values())


def _layout(kernel: Kernel, buffer: Buffer, plan: Plan) -> tuple[str, list[int]]:
    """The template of a register tile's layout, and its arguments behind the shape."""
    assert buffer.warps is not None
    if plan.arch.family == "sm90" and any(item.copies > 1 for item in kernel.buffers):
        return "SameRows", [buffer.warps[1]]
    more = [buffer.first_warp, buffer.copies] if buffer.copies > 1 else [buffer.first_warp] * bool(buffer.first_warp)
    return "Fragment", [*buffer.warps, *more]


def _registers(kernel: Kernel, names: Names) -> list[Fields]:
    """Declarations of the register buffers, without those that only name the order of a global accumulator."""
    used = {name_of(place) for stmt in statements(kernel.body) for place in (*stmt.writes(), *stmt.reads())}
    return [_register(item, names) for item in kernel.buffers if item.space is Space.REGISTER and item.name in used]


def _register(buffer: Buffer, names: Names) -> Fields:
    kind = names.fragments[buffer.name]
    if len(buffer.shape) == 1:
        count = f"held_columns<{kind}>()" if buffer.by_column else f"{kind}::ROWS"
        return {"declaration": f"{buffer.dtype.cuda} {buffer.name}[{count}];"}
    if buffer.dtype.bytes == 2:
        return {"declaration": f"uint32 {buffer.name}[{kind}::ROWS][{kind}::PAIRS];"}
    return {"declaration": f"float {buffer.name}[{kind}::ROWS][{kind}::COLS];"}


def indent(text: str) -> str:
    """The text with two spaces for each open brace; no two empty lines in a row, and none before a closing brace."""
    lines: list[str] = []
    depth = 0
    for raw in text.splitlines():
        line = raw.strip()
        if not line and (not lines or not lines[-1]):
            continue
        if line.startswith("}") and lines and not lines[-1]:
            lines.pop()
        code = line.split("//")[0]
        opened, closed = code.count("{"), code.count("}")
        outdent = 1 if code.startswith("}") else 0
        lines.append(("  " * (depth - outdent) + line) if line else "")
        depth += opened - closed
    return "\n".join(lines) + "\n"
