"""show --mask: pairs are drawn as the mask has them, and blocks as the kernel visits and masks them."""

import sys
from pathlib import Path

import numpy as np
import pytest
from functions import MASKS, SCORES, traced
from test_cli import call, output, sentence

from flashgen import lower
from flashgen.attention import forward
from flashgen.cli import mask
from flashgen.ir.expr import evaluate
from flashgen.ir.nodes import For, If, Let
from flashgen.spec import Spec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "masks" / "sliding_window.py"
SIZES = mask.Sizes(seqlen_q=21, seqlen_k=30, heads=4, head=1, batch=1, block_q=4, block_kv=8)
SPECS = [
    {"causal": True},
    {"causal": "top-left", "window": (5, 3)},
    *({"causal": causal, "mask": name} for name in MASKS for causal in (True, False)),
]


@pytest.mark.parametrize("options", SPECS, ids=str)
def test_pairs_and_blocks_agree(options):
    """A block that is skipped has no visible pair, and one that is full no hidden one (but behind the last query)."""
    drawing = mask.draw(Spec(16, 16, **traced(**options)), SIZES)
    kinds = mask.by_pair(drawing)
    assert not drawing.visible[kinds == mask.SKIPPED].any()
    assert drawing.visible[kinds == mask.FULL].all()


def test_pairs_are_what_the_function_says_of_numbers():
    drawing = mask.draw(Spec(16, 16, **traced(True, "by head")), SIZES)
    for q_idx, kv_idx in np.ndindex(21, 30):
        by_head = abs(q_idx - kv_idx) < 4 * SIZES.head + 3
        assert drawing.visible[q_idx, kv_idx] == (by_head and kv_idx <= q_idx + 9)


def of_the_kernel(spec):
    """The blocks as the statements of the forward have them, once its loop is tightened and its mask guarded."""
    kernel = lower.tile(forward.forward(spec))
    found = np.full((6, 4), mask.SKIPPED)
    names = {name: getattr(SIZES, name) for name in mask.Sizes.__dataclass_fields__}
    bounds = [stmt for stmt in kernel.body if isinstance(stmt, Let) and stmt.name != "head_kv"]
    loop = next(stmt for stmt in kernel.body if isinstance(stmt, For))
    for q_block in range(len(found)):
        names["q_block"] = q_block
        for stmt in bounds:
            names[stmt.name] = evaluate(stmt.value, names)
        for kv_block in range(evaluate(loop.start, names), evaluate(loop.stop, names)):
            names["kv_start"] = kv_block * SIZES.block_kv
            guards = [stmt for stmt in loop.body if isinstance(stmt, If)]
            hidden = not guards or any(evaluate(guard.condition, names) for guard in guards)
            found[q_block, kv_block] = mask.PARTIAL if hidden else mask.FULL
    return found


@pytest.mark.parametrize("options", SPECS, ids=str)
def test_blocks_are_those_that_the_kernel_visits_and_masks(options):
    spec = Spec(16, 16, **traced(**options))
    np.testing.assert_array_equal(mask.draw(spec, SIZES).blocks, of_the_kernel(spec))


WINDOW = ["##o.", "##oo", ".o##o.", "..##oo", "  .o##o.", "  ..##oo"]


def test_the_text():
    small = ("--seqlen-q", 6, "--seqlen-k", 8, "--block-q", 2, "--block-kv", 2)
    lines = output("show", "--mask", "--causal", "--window", "3,0", *small).splitlines()
    assert lines[0] == "d128_bf16_causal_window3_0: 6 queries down, 8 keys across; batch 0, head 0 of 4"
    assert lines[3] == "23 of 48 pairs are visible; blocks of 2 x 2: 3 full, 5 partial, 4 skipped"
    assert lines[5:] == WINDOW


def test_many_pairs_are_a_character_a_block():
    lines = output("show", "--mask", "--top-left", "--seqlen-q", 40, "--seqlen-k", 160).splitlines()
    assert lines[-6:] == ["a character a block: # full, o partial, blank: skipped", "o", "#o", "##o", "###o", "####o"]


def test_a_file_stands_for_its_options():
    spelled = output("show", "--mask", "--causal", "--window", "15,0")
    assert output("show", "--mask", EXAMPLE) == spelled
    assert output("show", "--ir", EXAMPLE) == output("show", "--ir", "--causal", "--window", "15,0")
    assert output("explain", EXAMPLE).splitlines()[0].startswith("d128_bf16_causal_window15_0 on sm_80")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "defines no `options`"),
        ("options = {'mask': 1}", "has mask; it may have causal, window, softcap, mask_mod, score_mod"),
        ("options = {'causal': 3}", "causal = 3 must be"),
        ("options = {'mask_mod': lambda b, h, q_idx, kv_idx: q_idx if kv_idx else 0}", "use flashgen.where"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path, text, complaint):
    file = tmp_path / "wrong.py"
    file.write_text(text)
    said = sentence("show", "--mask", file)
    assert complaint in said and "wrong.py" in said and "\n" not in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.py",), "nowhere.py is no Python file"),
        ((EXAMPLE, "--causal", "--softcap", 3), "causal, softcap cannot be given beside"),
        (("--head", 4), "head = 4 is not one of 4 heads; use 0 to 3"),
        (("--seqlen-q", 0), "seqlen_q = 0 must be 1 or more"),
        (("--batch", -1), "batch = -1"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_one_sentence(arguments, complaint):
    said = sentence("show", "--mask", *arguments)
    assert complaint in said and "\n" not in said


def test_a_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "mask.png"
    output("show", "--mask", EXAMPLE, "--png", file)
    assert image.imread(file).shape[:2] == (64 * mask.ENLARGED, 64 * mask.ENLARGED)


@pytest.mark.parametrize("score", list(SCORES))
def test_a_score_function_shades_what_is_visible(score):
    drawing = mask.draw(Spec(16, 16, **traced(True, None, score)), SIZES)
    shades = mask.shades(drawing)
    assert np.isfinite(shades).all() and shades.min() >= 0 and shades.max() <= 1
    np.testing.assert_array_equal(shades == 0, ~np.isfinite(drawing.scores))


def test_functions_that_read_arrays_are_not_drawn():
    with pytest.raises(ValueError, match="reads arrays that only a call has: mask_ids; draw functions without arrays"):
        mask.draw(Spec(16, 16, **traced(True, "document")), SIZES)


def test_a_picture_without_matplotlib_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = sentence("show", "--mask", "--png", tmp_path / "x.png")
    assert "pip install 'flashgen[bench]'" in said and "\n" not in said


def test_mask_is_shown_alone():
    assert call("show", "--mask", "--ir").exit_code == 2
