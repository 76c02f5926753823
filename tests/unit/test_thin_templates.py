"""Templates spell what Python decided. They loop, test a flag, call a macro and print a name; they compute nothing."""

from pathlib import Path

import pytest
from jinja2 import nodes

from flashgen.emit.env import environment

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"

# What a template wants to work out is a named field of the view model instead.
FORBIDDEN = {
    nodes.BinExpr: "arithmetic or logic",  # + - * / // % ** and or
    nodes.UnaryExpr: "arithmetic or logic",  # - + not
    nodes.Concat: "concatenation",
    nodes.Compare: "a comparison",
    nodes.Test: "a comparison",  # `x is none` is one by another name
    nodes.Filter: "a filter",
    nodes.FilterBlock: "a filter",
    nodes.Assign: "set",
    nodes.AssignBlock: "set",
}


def calls_string_method(node):
    """`name.upper()` is a filter by another name."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in dir(str)


def thoughts(source, name="template"):
    """One sentence for each place where a template computes."""
    for node in environment().parse(source).find_all(nodes.Node):
        for kind, word in FORBIDDEN.items():
            if isinstance(node, kind):
                yield f"{name}:{node.lineno}: {word} ({type(node).__name__})"
        if calls_string_method(node):
            yield f"{name}:{node.lineno}: a string method ({node.node.attr})"


def test_templates_compute_nothing():
    paths = sorted(TEMPLATES.rglob("*.jinja"))
    assert paths, "no template found"
    found = [t for p in paths for t in thoughts(p.read_text(encoding="utf-8"), str(p.relative_to(TEMPLATES)))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "${x * 2}",
        "${x - 1}",
        "${ -x }",
        "${a ~ b}",
        "${a | upper}",
        "${a.upper()}",
        "//% if a == b\ny\n//% endif\n",
        "//% if a is none\ny\n//% endif\n",
        "//% if a and b\ny\n//% endif\n",
        "//% if not a\ny\n//% endif\n",
        "//% set a = b\n",
    ],
)
def test_a_planted_thought_is_reported(source):
    assert len(list(thoughts(source))) == 1


def test_plain_spelling_passes():
    source = "//# why\n//% for s in steps\n//% if s.masked\n${macro(s.dst)};  // ${s.note}\n//% endif\n//% endfor\n"
    assert not list(thoughts(source))
