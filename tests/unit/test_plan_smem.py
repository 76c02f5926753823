"""The map of shared memory: what is alive together lies apart, and there are no gaps without a reason."""

import random
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from verdicts import SMALLEST

from flashgen import build
from flashgen.attention import backward
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import Const, I, J, load
from flashgen.ir.graph import interference
from flashgen.ir.nodes import Buffer, Fill, For, Kernel, Level, Map, Space
from flashgen.plan import smem
from flashgen.spec import Spec


@st.composite
def straight_kernels(draw):
    """Shared buffers that are filled and read at random places, some of them in a loop."""
    names = [f"t{at}" for at in range(draw(st.integers(1, 7)))]
    dims = st.sampled_from(["small", "large", "odd"])
    buffers = [Buffer(name, (draw(dims), draw(dims)), BF16, Space.SHARED) for name in names]
    register = Buffer("x", ("small", "small"), F32, Space.REGISTER)
    steps = [(draw(st.integers(0, 20)), Fill(name, Const(0.0))) for name in names]
    steps += [(at + draw(st.integers(0, 20)), Map("x", load(fill.dst, I, J))) for at, fill in steps]
    body = [stmt for _, stmt in sorted(steps, key=lambda step: step[0])]
    cut = draw(st.integers(0, len(body)))
    loop = (For("k", Const(0), Const(2), tuple(body[cut:])),) if draw(st.booleans()) and cut < len(body) else body[cut:]
    return Kernel("random", Level.TILE, (), (), (*buffers, register), (*body[:cut], *loop))


SIZES = {"small": 16, "large": 64, "odd": 24}


@settings(max_examples=100, deadline=None)
@given(straight_kernels(), st.integers(1, 3))
def test_buffers_that_are_alive_together_do_not_overlap(kernel, stages):
    depth = {"t0": stages}
    places = {place.buffer: place for place in smem.allocate(kernel, SIZES, depth)}
    alive = interference(kernel, Space.SHARED)
    assert places.keys() == set(alive.nodes)
    for one, other in combinations(places.values(), 2):
        overlap = one.offset < other.end and other.offset < one.end
        assert not (overlap and alive.has_edge(one.buffer, other.buffer)), f"{one.buffer} and {other.buffer}"
    for name, place in places.items():
        rows, cols = (SIZES[dim] for dim in kernel.buffer(name).shape)
        assert place.offset % 16 == 0 and place.end - place.offset == depth.get(name, 1) * rows * place.row_bytes
        assert cols * 2 <= place.row_bytes <= cols * 2 + 16
        below = [other.end for other in places.values() if alive.has_edge(name, other.buffer)]
        assert place.offset == 0 or place.offset in {-(-end // 16) * 16 for end in below}, "a gap without a reason"


def test_space_is_shared_where_lifetimes_allow():
    """O lies over Q, dK over K: what the forward and backward gain by the graph."""
    plan = build.forward(Spec(64, 64), SMALLEST)[0].plan
    assert plan.placement("o_tile").offset == plan.placement("q_tile").offset
    apart = sum(place.end - place.offset for place in plan.shared)
    assert plan.shared_bytes <= apart - plan.placement("o_tile").stage_bytes
    main = build.backward(Spec(64, 64), SMALLEST)[1].plan
    assert main.shared_bytes < sum(place.end - place.offset for place in main.shared)


def test_the_map_does_not_depend_on_the_order_of_declarations():
    spec = Spec(64, 64)
    kernel = backward.backward(spec)
    plan = build.backward(spec, SMALLEST)[1].plan
    shuffled = kernel.having(buffers=tuple(random.Random(0).sample(kernel.buffers, len(kernel.buffers))))
    assert smem.allocate(shuffled, plan.sizes, plan.stages) == smem.allocate(kernel, plan.sizes, plan.stages)
