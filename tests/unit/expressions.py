"""Hypothesis strategies: raw expression trees (nothing folded) over integer variables, and their conditions."""

from hypothesis import strategies as st

from flashgen.ir.expr import Binary, Compare, Const, Select, Unary, Var

NAMES = ("a", "b", "c")
ARITHMETIC = ("+", "-", "*", "//", "%", "min", "max")
LEAVES = [*(Var(name) for name in NAMES), *(Const(value) for value in (-3, -1, 0, 1, 2, 5, 12))]
values = st.fixed_dictionaries({name: st.integers(0, 40) for name in NAMES})


def number(draw, depth):
    """An integer: division and remainder only of what is not negative by what is positive, as the compiler does."""
    kind = draw(st.sampled_from([*ARITHMETIC, "neg", "select"])) if depth else ""
    if not kind:
        return draw(st.sampled_from(LEAVES))
    x = number(draw, draw(st.integers(0, depth - 1)))
    if kind == "neg":
        return Unary("neg", x)
    y = number(draw, draw(st.integers(0, depth - 1)))
    if kind == "select":
        return Select(condition(draw, depth - 1), x, y)
    if kind in ("//", "%"):
        return Binary(kind, Binary("max", x, Const(0)), Binary("max", y, Const(1)))
    return Binary(kind, x, y)


def condition(draw, depth):
    """Comparisons, and conjunctions and disjunctions of them."""
    if depth and draw(st.booleans()):
        return Binary(draw(st.sampled_from("&|")), condition(draw, depth - 1), condition(draw, depth - 1))
    x, y = number(draw, max(depth - 1, 0)), number(draw, max(depth - 1, 0))
    return Compare(draw(st.sampled_from(["<", "<=", ">", ">=", "=="])), x, y)


@st.composite
def integers(draw):
    return number(draw, 3)


@st.composite
def conditions(draw):
    return condition(draw, 3)
