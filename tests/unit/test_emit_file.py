"""The file: no template left over, each number once, everything declared before it is used."""

import re

import pytest
from emitted_kernels import ALL, FORWARD, each

from flashgen.emit.cuda import cuda, indent
from flashgen.emit.env import header
from flashgen.ir.dtype import F32
from flashgen.ir.nodes import For, Let, Space
from flashgen.ir.visit import statements

LEFT_OVER = r"\$\{|//%|//#|<%|%>|<#|#>|\{\{|Undefined|\bNone\b|\bTrue\b|\bFalse\b|<built-in|object at 0x|\bnan"


@each
def test_nothing_of_a_template_is_left_over(spec, stages):
    text = stages.source.text
    assert not re.search(LEFT_OVER, text), re.search(LEFT_OVER, text)
    for opened, closed in ("{}", "()", "[]"):
        assert text.count(opened) == text.count(closed) > 0
    assert text.endswith("}\n") and "\n\n\n" not in text
    assert all(line == line.rstrip() and "\t" not in line for line in text.splitlines())


@pytest.mark.parametrize("planted", ["${name}", "//% endif", "x = None;", "<# why #>"])
def test_left_overs_would_be_seen(planted):
    assert re.search(LEFT_OVER, planted)


@each
def test_the_file_says_what_it_is_and_each_number_once(spec, stages):
    text, plan = stages.source.text, stages.plan
    lines = text.splitlines()
    own = spec.forward() if stages.tile.name == "attention_forward" else spec
    assert lines[0].startswith(f"// {stages.tile.name}: {own}.") and plan.text().splitlines()[0] in text
    constants = re.findall(r"^constexpr int (\w+) = (\d+);", text, re.MULTILINE)
    assert len(dict(constants)) == len(constants)
    found = {name: int(value) for name, value in constants}
    assert found["THREADS"] == plan.threads and found["MIN_BLOCKS"] == plan.min_blocks
    for name, size in plan.dims:
        assert found.get(name.upper(), size) == size
    for place in plan.shared:
        assert found[f"{place.buffer.upper()}_OFFSET"] == place.offset
    assert f'extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) {stages.tile.name}(' in text
    assert stages.source.name == stages.tile.name


@each
def test_includes_are_the_headers_that_come_along(spec, stages):
    names = re.findall(r'#include "([^"]+)"', stages.source.text)
    assert [name for name, _ in stages.source.headers] == names
    assert all(text == header(name.split("/")[1]) for name, text in stages.source.headers)


@each
def test_arguments_are_the_globals_in_the_order_of_the_kernel(spec, stages):
    struct = stages.source.text.split("struct Args {")[1].split("};")[0]
    members = re.findall(r"^\s*(?:Tensor|Vector)<\w+> (\w+);", struct, re.MULTILINE)
    assert members == [b.name for b in stages.machine.buffers if b.space is Space.GLOBAL]
    scalars = re.findall(r"^\s*(?:int|float) (\w+);", struct, re.MULTILINE)
    assert scalars == [scalar.name for scalar in stages.machine.scalars]


@each
def test_every_local_is_declared_before_it_is_used(spec, stages):
    """Loop variables, grid indices and Lets: the first line that has the name declares it."""
    text = stages.source.text.split("__global__")[1]
    names = [axis.name for axis in stages.machine.axes]
    names += [s.name for s in statements(stages.machine.body) if isinstance(s, Let)]
    names += [s.axis for s in statements(stages.machine.body) if isinstance(s, For)]
    names += [b.name for b in stages.machine.buffers if b.space is Space.SHARED]
    for name in names:
        first = next(line for line in text.splitlines() if re.search(rf"(?<![\w.]){name}\b", line.split("//")[0]))
        assert re.search(rf"(const int|for \(int|const SharedAddress|float\* const) {name}\b", first), first


def test_longest_tiles_come_first_where_the_kernel_says_so():
    assert re.search(r"const int q_block = q_block_count - 1 - blockIdx\.x;", FORWARD.source.text)
    full = ALL["d128_bf16-attention_forward"][1].source.text
    assert "const int q_block = blockIdx.x;" in full


def test_the_text_does_not_depend_on_what_was_emitted_before():
    spec, stages = ALL["d128_bf16-attention_backward"]
    assert cuda(stages.machine, stages.plan, spec) == stages.source


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a {\nb;\n}\n", "a {\n  b;\n}\n"),
        ("a {\nif (x) {\nb;\n} else {\nc;\n}\n}\n", "a {\n  if (x) {\n    b;\n  } else {\n    c;\n  }\n}\n"),
        ("\n\na;\n\n\n\nb;\n", "a;\n\nb;\n"),
        ("a {\nif (x) {\nb;\n\n}\n\n\n}\n\nc;\n", "a {\n  if (x) {\n    b;\n  }\n}\n\nc;\n"),
        ("x = {1, 2};\ny; // {\nz;\n", "x = {1, 2};\ny; // {\nz;\n"),
    ],
)
def test_indentation_follows_the_braces(raw, expected):
    assert indent(raw) == expected


def test_floats_of_the_ir_are_floats_of_c():
    """A literal without f would make the whole expression double."""
    for _, stages in ALL.values():
        code = re.sub(r"//.*", "", stages.source.text)
        assert not re.search(r"(?<![\w.])\d+\.\d+(e[-+]?\d+)?(?![\df])", code)
        assert F32.cuda == "float" and "double" not in code
