"""Statements, macros and meanings in step: each is declared in full, and printed as often as it stands in the IR."""

import re
from dataclasses import fields

import pytest
from emitted_kernels import FORWARD, SPEC, each

from flashgen.emit.cuda import STRUCTURE, cuda
from flashgen.emit.env import templates
from flashgen.interp import machine as interpreter
from flashgen.ir.nodes import For, If, Let, Note
from flashgen.ir.visit import statements
from flashgen.machine.base import Barrier, FillFragment, MachineStmt


def subclasses(kind):
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in subclasses(child))]


STATEMENTS = [kind for kind in subclasses(MachineStmt) if kind.NAME]
FILES = {path.stem: path for path in sorted((templates() / "stmt").glob("*.jinja"))}


def macros(family):
    """Names of the macros of a file, read from its text."""
    return re.findall(r"^//% macro (\w+)\(", FILES[family].read_text(), re.MULTILINE)


def test_every_statement_has_a_macro_and_every_macro_a_statement():
    named = {kind.FAMILY: [] for kind in STATEMENTS}
    for kind in STATEMENTS:
        named[kind.FAMILY].append(kind.NAME)
    named["common"] += [*STRUCTURE.values(), "remark"]
    assert named.keys() == FILES.keys()
    for family, names in named.items():
        assert sorted(macros(family)) == sorted(set(names)) == sorted(names), family


@pytest.mark.parametrize("kind", STATEMENTS, ids=lambda kind: kind.NAME)
def test_each_statement_is_declared_in_full(kind):
    """Its name, the fields it writes and reads, its formula, its precondition in words, its meaning on the CPU."""
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() == kind.NAME
    names = {item.name for item in fields(kind)}
    assert set(kind.WRITES) | set(kind.READS) <= names
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), "a docstring of its own"
    families = ("sm80", "sm90") if kind.FAMILY == "common" else (kind.FAMILY,)
    assert all(kind in interpreter.FAMILIES[family] for family in families)
    touches_shared = {item.type for item in fields(kind)} & {"Tile", "Place", "Expr"} and kind is not FillFragment
    words = kind.NEEDS.split()
    assert words == ["nothing"] or len(words) >= 4
    assert not touches_shared or len(words) >= 4, f"{kind.NAME} touches shared memory and needs nothing"


def test_the_interpreter_knows_no_other_statements():
    known = {kind for family in interpreter.FAMILIES.values() for kind in family}
    assert known - {For, If, Let, Note} == set(STATEMENTS)


@each
def test_every_statement_of_a_kernel_is_printed(spec, stages):
    """Each macro is called as often as its statement stands in the IR: calls are counted in the text."""
    text = stages.source.text
    calls = {
        "copy_tile_async": "copy_tile_async<",
        "copy_tile_elements": "copy_tile_elements<",
        "copy_vector_async": "copy_vector_async<",
        "commit_group": "commit_group();",
        "wait_group": "wait_group<",
        "barrier": "__syncthreads();",
        "store_tile": "store_tile<",
        "store_fragment": "store_fragment<",
        "reduce_rows": "reduce_rows<",
        "combine_lanes": "combine_lanes<",
        "pack_fragment": "= pack<",
        "mma_sync": "multiply_",
        "store_rows": "store_rows<",
        "load_rows": "load_rows<",
        "add_fragment": "add_fragment<",
        "load_fragment": "load_fragment<",
        "zero_window": "zero_window<",
    }
    names = [stmt.NAME for stmt in statements(stages.machine.body) if isinstance(stmt, MachineStmt)]
    for name, call in calls.items():
        assert text.count(call) == names.count(name), name
    lets = [stmt.name for stmt in statements(stages.machine.body) if isinstance(stmt, Let)]
    assert all(f"const int {name} = " in text for name in lets)


@each
def test_notes_become_comments(spec, stages):
    text = stages.source.text
    for stmt in statements(stages.machine.body):
        assert not stmt.note or f"// {stmt.note}\n" in text


def test_a_statement_of_its_own_in_a_kernel_appears_in_the_cuda():
    """The IR is what is printed: one statement more, one line more, and the same template."""
    extra = FORWARD.machine.having(body=(*FORWARD.machine.body, Barrier(note="one more")))
    texts = (FORWARD.source.text, cuda(extra, FORWARD.plan, SPEC).text)
    before, after = ([line for line in text.splitlines() if line] for text in texts)
    assert after == [*before[:-1], "  // one more", "  __syncthreads();", before[-1]]
