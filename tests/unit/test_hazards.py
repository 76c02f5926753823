"""The walk that finds hazards, on small programs of copies, waits, barriers and products."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged_kernels import ALL

from flashgen.attention import parts
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import Const, Var
from flashgen.ir.nodes import Buffer, For, Kernel, Level, Space, Tile
from flashgen.machine.base import Barrier, StoreFragment
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
    CopyTileElements,
    CopyVectorAsync,
    MmaSync,
    Sm80Stmt,
    WaitGroup,
)
from flashgen.machine.sm80_hazards import hazards
from flashgen.plan.plan import Placement

X, Y = Tile("x"), Tile("y")
REGISTERS = [Buffer("s", ("n", "n"), F32, Space.REGISTER, warps=(2, 1))]
REGISTERS += [Buffer(f"out{split}", ("n", "n"), BF16, Space.REGISTER, warps=(2 // split, split)) for split in (1, 2)]
HERE = parts.rows_of("g", Const(0), Const(0))
COPY_X, LANDED = (CopyTileAsync(X, HERE), CommitGroup()), (WaitGroup(0), Barrier())
USE_X = MmaSync("s", X, X, transpose_b=True)
STORE_X, STORE_Y = StoreFragment(X, "out1"), StoreFragment(Y, "out1")


def found(*body, offset=512, stages=1):
    """Reasons of the hazards of a small program on two tiles of 512 bytes; `offset` moves y over x."""
    shared = tuple(Buffer(name, ("n", "n"), BF16, Space.SHARED, stages) for name in "xy")
    everything = (Buffer("g", ("b", "h", "rows", "n"), BF16, Space.GLOBAL), *shared, *REGISTERS)
    kernel = Kernel("walk", Level.MACHINE, (), (), everything, body)
    plan = replace(
        ALL["attention_delta"].plan,
        shared=tuple(Placement(n, o, 512, stages, 32) for n, o in (("x", 0), ("y", offset))),
    )
    return [hazard.reason for hazard in hazards(kernel, plan)]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ((*COPY_X, *LANDED, USE_X), []),
        ((*COPY_X, USE_X), ["reads x while its copy is in flight"]),
        ((*COPY_X, WaitGroup(0), USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((*COPY_X, Barrier(), WaitGroup(0), USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((COPY_X[0], *LANDED, USE_X), ["reads x while its copy is in flight"]),  # never committed
        ((*COPY_X, WaitGroup(1), Barrier(), USE_X), ["reads x while its copy is in flight"]),
        ((*COPY_X, CommitGroup(), WaitGroup(1), Barrier(), USE_X), []),
        ((STORE_X, USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((STORE_X, Barrier(), USE_X, STORE_X), ["overwrites x while other warps may still read it"]),
        ((STORE_X, Barrier(), USE_X, Barrier(), STORE_X), []),
        ((*COPY_X, *COPY_X, *LANDED, USE_X), ["overwrites x while its copy is in flight"]),
        ((*COPY_X, STORE_X), ["overwrites x while its copy is in flight"]),
        ((*COPY_X, WaitGroup(0), STORE_X), ["overwrites x while other warps may still write it"]),
        ((STORE_X, STORE_X, Barrier(), USE_X), []),  # each thread overwrites its own
        ((STORE_X, StoreFragment(X, "out2")), ["overwrites x while other warps may still write it"]),
        ((USE_X,), ["reads x before anything was written to this stage"]),
    ],
)
def test_hazards_of_small_programs(body, reasons):
    assert found(*body) == reasons


def test_buffers_laid_over_each_other():
    assert found(STORE_X, STORE_Y) == []
    for offset in (0, 256, 511):
        assert found(STORE_X, STORE_Y, offset=offset) == ["overwrites x while other warps may still write it"]
        assert found(STORE_X, Barrier(), STORE_Y, offset=offset) == []
        assert found(*COPY_X, STORE_Y, offset=offset) == ["overwrites x while its copy is in flight"]
        assert found(STORE_X, Barrier(), USE_X, STORE_Y, offset=offset) == [
            "overwrites x while other warps may still read it"
        ]
        lost = found(STORE_X, Barrier(), STORE_Y, Barrier(), USE_X, offset=offset)
        assert lost == ["reads x after y was written over it"]


def test_stages_are_regions_of_their_own():
    step = Var("k")
    copy = CopyTileAsync(Tile("x", step % 2), HERE)
    use = MmaSync("s", Tile("x", step % 2), Tile("x", step % 2), transpose_b=True)
    loop = For("k", Const(0), Var("n"), (copy, CommitGroup(), *LANDED, use))
    assert found(loop, stages=2, offset=1024) == []  # each step fills the slot that the step before did not read
    wrong = replace(loop, body=(*loop.body[:-1], replace(use, b=Tile("x", (step + 1) % 2))))
    assert "reads x before anything was written to this stage" in found(wrong, stages=2, offset=1024)
    single = replace(loop, body=(replace(copy, dst=X), CommitGroup(), *LANDED, USE_X))
    assert found(single) == ["overwrites x while other warps may still read it"]


@pytest.mark.parametrize("kind", [CopyTileAsync, CopyTileElements])
@pytest.mark.parametrize("lands_later", [True, False])
def test_the_walk_asks_the_statement_whether_it_lands_later(monkeypatch, kind, lands_later):
    monkeypatch.setattr(kind, "ASYNCHRONOUS", lands_later)
    copy, use = kind(X, HERE), USE_X
    assert found(copy, CommitGroup(), Barrier(), use) == ["reads x while its copy is in flight"] * lands_later
    assert found(copy, CommitGroup(), *LANDED, use) == []


def test_what_lands_at_its_wait_is_declared_asynchronous():
    kinds = Sm80Stmt.__subclasses__()
    later = {kind for kind in kinds if "landing at its wait" in kind.__doc__}
    assert later == {kind for kind in kinds if kind.ASYNCHRONOUS} == {CopyTileAsync, CopyVectorAsync}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*COPY_X, *LANDED, USE_X, STORE_X, STORE_Y]), max_size=8))
def test_more_barriers_never_make_more_hazards(program):
    crowded = [stmt for item in program for stmt in (Barrier(), item)]
    assert len(found(*crowded)) <= len(found(*program))
