"""View models: names, places, elements of registers, and the layouts that tiles share."""

from dataclasses import replace

from emitted_kernels import BACKWARD, FORWARD

from flashgen.emit.names import Names, camel
from flashgen.emit.view import statement
from flashgen.ir.expr import NEG_INF, Const, I, J, Var, load, select
from flashgen.ir.nodes import For, Tile, Window
from flashgen.ir.visit import statements
from flashgen.machine.base import MapFragment, PackFragment
from flashgen.machine.sm80 import CopyTileAsync, MmaSync

NAMES_OF = Names(FORWARD.machine, FORWARD.plan)


def test_dimensions_arguments_and_locals():
    assert [NAMES_OF.variable(name) for name in ("block_q", "seqlen_k", "scale_log2", "kv_block")] == [
        *("BLOCK_Q", "args.seqlen_k", "args.scale_log2", "kv_block")
    ]
    assert (
        NAMES_OF.uniform(Var("kv_block") * Var("block_kv") < Var("seqlen_k")) == "kv_block * BLOCK_KV < args.seqlen_k"
    )
    assert camel("q_tile") == "QTile" and camel("s") == "S"


def test_a_choice_of_ends_of_a_loop_is_one_operand_of_its_comparison():
    """`step < a < b ? c : 0` would compare a truth value with b, and end nowhere."""
    chosen = For("step", Const(0), select(Var("kv_block") < 3, Var("seqlen_q"), Const(0)), ())
    assert statement(chosen, NAMES_OF, "")["stop"] == "(kv_block < 3 ? args.seqlen_q : 0)"
    summed = replace(chosen, stop=Var("kv_block") + Var("seqlen_q"))
    assert statement(summed, NAMES_OF, "")["stop"] == "kv_block + args.seqlen_q"


def test_places():
    window = Window("k", (Var("batch"), Var("head_kv"), Var("kv_block") * Var("block_kv")))
    assert NAMES_OF.place("s") == "s" and NAMES_OF.place(Tile("q_tile")) == "q_tile"
    assert NAMES_OF.place(window) == "args.k.at(batch, head_kv, kv_block * BLOCK_KV)"
    assert NAMES_OF.rows_left(window) == "args.seqlen_k - kv_block * BLOCK_KV"
    later = Window("k", (Var("batch"), Var("head_kv"), Var("a") - 1))
    assert NAMES_OF.rows_left(later) == "args.seqlen_k - (a - 1)"
    first = Window("k", (Var("batch"), Var("head_kv"), Const(0)))
    assert NAMES_OF.rows_left(first) == "args.seqlen_k"
    assert NAMES_OF.place(Tile("k_tile", Var("a") % 2)) == "k_tile + a % 2 * KTile::BYTES"
    assert NAMES_OF.place(Tile("k_tile", Var("a") + 1)) == "k_tile + (a + 1) * KTile::BYTES"


def test_elements_of_registers_and_of_shared_vectors():
    buffer = FORWARD.machine.buffer("s")
    kind = NAMES_OF.fragments["s"]
    expr = select(Var("kv_start") + J <= I, load("s", I, J), NEG_INF)
    assert NAMES_OF.element(expr, buffer) == f"kv_start + {kind}::col(j) <= {kind}::row(i) ? s[i][j] : -INF"
    assert NAMES_OF.element(J * 2, buffer, "2 * j + 1") == f"{kind}::col(2 * j + 1) * 2"
    rows = NAMES_OF.element(load("s", I, J) - load("row_max", I), buffer)
    assert rows == "s[i][j] - row_max[i]"
    other = Names(BACKWARD.machine, BACKWARD.plan)
    kind = other.fragments["s"]
    assert other.element(load("lse_tile", J), BACKWARD.machine.buffer("s")) == f"lse_tile[{kind}::col(j)]"
    staged = load("lse_tile", Var("step") % 2, J)
    assert other.element(staged, BACKWARD.machine.buffer("s")) == f"lse_tile[step % 2 * BLOCK_Q + {kind}::col(j)]"


def test_tiles_of_one_shape_and_division_share_a_layout():
    assert NAMES_OF.fragments["s"] == NAMES_OF.fragments["p"] == NAMES_OF.fragments["p_operand"]
    assert NAMES_OF.fragments["o_acc"] != NAMES_OF.fragments["s"]
    other = FORWARD.machine.with_buffer(replace(FORWARD.machine.buffer("p"), warps=(1, 4)))
    assert Names(other, FORWARD.plan).fragments["p"] != Names(other, FORWARD.plan).fragments["s"]
    assert {NAMES_OF.fragments[name] for name in ("row_max", "lse_row")} <= set(NAMES_OF.fragments.values())


def view(stmt):
    return statement(stmt, NAMES_OF, "")


def test_view_models_are_spelled():
    product = next(s for s in statements(FORWARD.machine.body) if isinstance(s, MmaSync) and s.acc == "s")
    seen = view(product)
    assert seen["product"] == "multiply_shared" and seen["accumulate"] is False
    assert seen["types"] == f"UNROLLED_DEPTH, {NAMES_OF.fragments['s']}, QTile, false, KTile, true"
    copy = next(
        s for s in statements(FORWARD.machine.body) if isinstance(s, CopyTileAsync) and s.dst.buffer == "q_tile"
    )
    assert view(copy) | {"row_stride": "args.q.row_stride", "true_cols": "TRUE_HEAD_DIM"} == view(copy)
    assert view(copy)["dst_type"] == "QTile" and view(copy)["rows"] == "args.seqlen_q - q_start"
    packed = view(PackFragment("p_operand", load("p", I, J)))
    assert (packed["even"], packed["odd"]) == ("p[i][2 * j]", "p[i][2 * j + 1]")
    assert view(MapFragment("row_max", load("row_sum", I)))["dst_is_tile"] is False
