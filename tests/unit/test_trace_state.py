"""The state of a function: equal where its trace is, another where what it reaches is, none where nobody can tell."""

import functools
import importlib
import math
import operator
import sys
import types

import numpy as np
import pytest

import flashgen
from flashgen import masks, scores
from flashgen.trace import state as states
from flashgen.trace.state import state


def defined(text, **variables):
    """`f` of a text, in globals of its own; and these globals."""
    own = {"__name__": "users", "flashgen": flashgen, "math": math, "masks": masks} | variables
    exec(text, own)
    return own["f"], own


@pytest.fixture
def module():
    """A module with a number, which no other test sees."""
    made = types.ModuleType("users_numbers")
    made.limit, made.other = 5, 1
    return made


def of_a_cell(limit, step=1):
    return lambda b, h, q_idx, kv_idx: (kv_idx < limit) & (q_idx % step == 0)


def of_a_default(limit):
    return lambda b, h, q_idx, kv_idx, limit=limit: kv_idx < limit


def of_a_keyword(limit):
    return lambda b, h, q_idx, kv_idx, *, limit=limit: kv_idx < limit


def of_a_function(limit):
    def helper(kv_idx):
        return kv_idx < limit

    return lambda b, h, q_idx, kv_idx: helper(kv_idx)


def of_a_comprehension(limit):
    return lambda b, h, q_idx, kv_idx: sum((kv_idx < place) * 1 for place in range(3) if place < limit) > 0


def of_a_function_in_it(limit):
    def sees(b, h, q_idx, kv_idx):
        def inner(x):
            return (lambda: x < limit)()

        return inner(kv_idx)

    return sees


def of_an_attribute(limit):
    def sees(b, h, q_idx, kv_idx):
        return kv_idx < q_idx

    sees.file_name = limit
    return sees


MAKERS = [
    of_a_cell,
    of_a_default,
    of_a_keyword,
    of_a_function,
    of_a_comprehension,
    of_a_function_in_it,
    of_an_attribute,
]
NUMBERS = [0, 1, True, False, 1.0, 0.0, -0.0, math.inf, 2**70, "1", None, (1,), (True,), (1.0,), ((1,),), (), len, int]


@pytest.mark.parametrize("make", MAKERS)
def test_values_that_are_reached_are_told_apart_with_their_types(make):
    found = [state(make(value)) for value in NUMBERS]
    assert None not in found and len(set(found)) == len(NUMBERS)
    assert found == [state(make(value)) for value in NUMBERS], "functions made again have the same states"
    assert state(make(math.nan)) == state(make(float("nan")))


@pytest.mark.parametrize(
    "text",
    [
        "f = lambda b, h, q, k: k < limit",
        "f = lambda b, h, q, k: (lambda: k < limit)()",
        "f = lambda b, h, q, k: sum((k < limit) * 1 for _ in range(2)) > 0",
        "def g(k): return k < limit\ndef f(b, h, q, k): return g(k)",
        "def g(k, n=3): return k < limit if n == 0 else g(k, n - 1)\nf = lambda b, h, q, k: g(k)",
        "def f(b, h, q, k):\n    for n in range(limit): k = k + n\n    return k < q",
        "def f(b, h, q, k, n=2): return k < limit if n == 0 else f(b, h, q, k, 0)",
    ],
)
def test_globals(text):
    f, own = defined(text, limit=5)
    before = state(f)
    assert before is not None and before == state(f) == state(defined(text, limit=5)[0])
    own["unrelated"] = [1]
    assert state(f) == before
    for value in (6, 5.0, True):
        own["limit"] = value
        assert state(f) not in (before, None)
    own["limit"] = [5]
    assert state(f) is None
    del own["limit"]
    assert state(f) not in (before, None), "an error, until it is defined"


def test_numbers_in_modules(module):
    f, _ = defined("f = lambda b, h, q, k: k < m.limit", m=module)
    before = state(f)
    module.other = [2]
    assert state(f) == before is not None
    module.limit = 6
    assert state(f) != before
    module.limit = 5
    assert state(f) == before
    within = types.ModuleType("outer")
    within.m = module
    f, _ = defined("f = lambda b, h, q, k: k < outer.m.limit", outer=within)
    before = state(f)
    within.m = types.ModuleType("users_numbers")
    assert state(f) not in (before, None)
    within.m.limit = 5
    assert state(f) == before


def test_modules_in_cells(module):
    f = (lambda m: lambda b, h, q, k: k < m.limit)(module)
    before = state(f)
    module.limit = 7
    assert state(f) not in (before, None)


@pytest.mark.parametrize(
    "text",
    [
        "f = lambda b, h, q, k: k < getattr(m, 'limit')",
        "f = lambda b, h, q, k: k < vars(m)['limit']",
        "f = lambda b, h, q, k: k < m.__dict__['limit']",
        "def g(x, k): return k < x.limit\nf = lambda b, h, q, k: g(m, k)",
        "def f(b, h, q, k):\n    x = m\n    return k < x.limit",
        "f = lambda b, h, q, k, x=m: k < x.limit",
        "f = lambda b, h, q, k: k < (m or None).limit",
        "f = lambda b, h, q, k: k < int('{0.limit}'.format(m))",
        "f = lambda b, h, q, k: k < (m,)[0].limit",
    ],
)
def test_a_module_that_is_handed_on_has_no_state(module, text):
    assert state(defined(text, m=module)[0]) is None


def test_modules_that_make_up_attributes(module):
    module.__getattr__ = lambda name: 3
    assert state(defined("f = lambda b, h, q, k: k < m.limit", m=module)[0]) is not None
    assert state(defined("f = lambda b, h, q, k: k < m.made_up", m=module)[0]) is None
    lazy = type("Lazy", (types.ModuleType,), {"limit": 3})("lazy")
    assert state(defined("f = lambda b, h, q, k: k < m.limit", m=lazy)[0]) is None


class Config:
    limit = 3

    def sees(self, b, h, q_idx, kv_idx):
        return kv_idx < self.limit

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx < self.limit


@pytest.mark.parametrize(
    "value",
    [
        *([1], {1: 2}, {1}, bytearray(b"1"), np.ones(2), np.float64(1.0), np.int64(1), (1, [2]), iter([1]), object()),
        *(Config, Config(), Config().sees, [1].append, "x".join, functools.partial(len), functools.lru_cache(len)),
        *(operator.attrgetter("x"), operator.methodcaller, np.where, sys, open, getattr, setattr, globals, vars, eval),
        *(exec, __import__, id, hash, print),
    ],
    ids=lambda value: type(value).__name__ + getattr(value, "__name__", ""),
)
def test_what_cannot_be_told_has_no_state(value):
    assert state(value) is None
    for make in MAKERS:
        assert state(make(value)) is None


# A function in another, which does something with the variable of that.
WRITES = """
def make():
    n = 0
    def f(b, h, q, k):
        {}
        return k < n
    return f
f = make()
"""


@pytest.mark.parametrize(
    "text",
    [
        "def f(b, h, q, k):\n    global n\n    n = 1\n    return k < n",
        "def f(b, h, q, k):\n    global n\n    del n\n    return k < q",
        "def f(b, h, q, k):\n    def g():\n        global n\n        n = 2\n    g()\n    return k < q",
        WRITES.format("nonlocal n; n += 1"),
        WRITES.format("def g():\n            nonlocal n; n += 1\n        g()"),
        WRITES.format("def g():\n            nonlocal n; del n\n        g()"),
        "def f(b, h, q, k):\n    f.n = 1\n    return k < q",
        "def f(b, h, q, k):\n    del f.n\n    return k < q",
        "def f(b, h, q, k):\n    import math\n    return k < q",
        "def f(b, h, q, k):\n    from math import pi\n    return k < pi",
        "def f(b, h, q, k):\n    class A:\n        x = n\n    return k < A.x",
        "def f(b, h, q, k): return k < f.__globals__['n']",
        "def f(b, h, q, k): return k < (x for x in ()).gi_frame.f_back.f_globals['n']",
        "def f(b, h, q, k):\n    exec('x = n')\n    return k < q",
        "def f(b, h, q, k): return k < eval('n')",
        "def f(b, h, q, k):\n    match f:\n        case object(n=x): return k < x\n    return k < q",
        "def g():\n    global n\n    n += 1\n    return n\ndef f(b, h, q, k): return k < g()",
        "import random\nf = lambda b, h, q, k: k < random.random()",
        "import random\nf = lambda b, h, q, k: k < random.randint(1, 2)",
        "import time\nf = lambda b, h, q, k: k < time.time()",
        "import os\nf = lambda b, h, q, k: k < int(os.getenv('N', '1'))",
    ],
)  # fmt: skip
def test_code_that_reaches_further_has_no_state(text):
    assert state(defined(text, n=0)[0]) is None


def test_a_write_to_variables_of_its_own_is_harmless():
    text = """
def f(b, h, q, k):
    n, x = 0, [1]
    def g():
        nonlocal n
        n += 1
    g()
    x[0] = 2
    return k < n
"""
    assert state(defined(text)[0]) is not None


def test_functions_that_call_each_other():
    text = "def g(k, n): return k < {} if n == 0 else f(0, 0, 0, k, n - 1)\ndef f(b, h, q, k, n=2): return g(k, n - 1)"
    three, other = (defined(text.format(number))[0] for number in (3, 4))
    assert state(three) == state(defined(text.format(3))[0]) is not None
    assert state(three) != state(other) is not None


def test_helpers_are_followed_and_others_are_told_apart():
    one, own = defined("def g(k): return k < 3\ndef f(b, h, q, k): return g(k)")
    before = state(one)
    exec("def g(k): return k < 4", own)
    assert state(one) not in (before, None)
    own["g"] = masks.causal
    assert state(one) not in (before, None)


def test_a_builtin_that_is_hidden_by_a_global():
    f, own = defined("f = lambda b, h, q, k: abs(k - q) < 3")
    before = state(f)
    own["abs"] = flashgen.abs
    assert state(f) not in (before, None)
    own["abs"] = lambda x: x
    assert state(f) not in (before, None)
    own["abs"] = Config()
    assert state(f) is None


FACTORIES = [masks.prefix, masks.chunked, masks.dilated, masks.strided, lambda n: masks.window(n, 0)]
FACTORIES += [lambda n: masks.sink_window(n, 0), lambda n: scores.softcap(float(n)), lambda n: scores.relative_bias(n)]


@pytest.mark.parametrize("make", FACTORIES)
def test_factories_of_this_package(make):
    assert state(make(100)) == state(make(100)) is not None
    assert state(make(100)) != state(make(50)) is not None


@pytest.mark.parametrize("one", [masks.causal, masks.causal_top_left, masks.document, scores.alibi, scores.bias])
def test_functions_of_this_package(one):
    assert state(one) is not None and state(one) != state(scores.slopes)
    assert state(defined("f = lambda *x: g(*x)", g=one)[0]) is not None


def test_numbers_of_the_trace():
    f, own = defined("f = lambda b, h, q, k: k < half", half=flashgen.seqlen_k // 2)
    before = state(f)
    assert before is not None
    own["half"] = flashgen.seqlen_k // 3
    assert state(f) not in (before, None)
    own["half"] = flashgen.seqlen_k * 1 // 2
    assert state(f) == before
    assert len({state(x) for x in (flashgen.seqlen_q, flashgen.seqlen_k, flashgen.heads, flashgen.heads * 1.0)}) == 4


def test_a_module_that_is_loaded_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "users_masks_again.py"
    path.write_text("LIMIT = 3\ndef f(b, h, q, k): return k < LIMIT\n")
    module = importlib.import_module("users_masks_again")
    before = state(module.f)
    assert state(importlib.reload(module).f) == before is not None
    path.write_text("LIMIT = 44\ndef f(b, h, q, k): return k < LIMIT\n")
    importlib.invalidate_caches()
    assert state(importlib.reload(module).f) != before


def test_large_and_deep_values_have_none():
    assert state((0,) * states.LARGEST) is not None and state((0,) * (states.LARGEST + 1)) is None
    deep = ()
    for _ in range(states.DEEPEST + 1):
        deep = (deep,)
    assert state(deep) is None
    text = "".join(f"def g{n}(k): return g{n + 1}(k)\n" for n in range(100)) + "f = g0\ndef g100(k): return k"
    assert state(defined(text)[0]) is None


def test_calls_are_no_attributes_of_each_other():
    """f(a).x is of what f gives: only what is asked of a variable at once is its attribute."""
    found = states._reads((lambda m, k: operator.and_(k).x + math.pi).__code__)
    assert list(found.globals) == [("operator", ("and_",)), ("math", ("pi",))]


def test_in_a_later_python_functions_of_users_have_no_state(monkeypatch):
    """Its opcodes are not known: one that writes might not be noticed."""

    def own(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 30

    assert state(own) is not None
    states._reads.cache_clear()
    monkeypatch.setattr(states, "NEWEST", (3, 10))
    assert state(own) is None and state(masks.document) is not None
    states._reads.cache_clear()
