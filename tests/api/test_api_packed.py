"""Which calls take the forward that packs heads into a tile, and what it is bound to. NumPy arrays pass for a GPU's."""

import numpy as np
import pytest

import flashgen
from flashgen.kernel import Kernel, programs
from flashgen.plan.arch import parse_arch
from flashgen.runtime import launch, tile_counters
from flashgen.runtime.arrays import LIBRARIES
from flashgen.runtime.program import MAX_TILES
from flashgen.spec import Spec, parse_dtype

HOPPER = (9, 0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is only there until something is launched."""
    device = {"capability": HOPPER}
    monkeypatch.setattr(type(LIBRARIES["numpy"]), "device", lambda self, x: 0)
    monkeypatch.setattr(launch, "compute_capability", lambda index: device["capability"])
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(tile_counters, "address", lambda stream, index: pytest.fail("nothing is launched here"))
    return device


def kernel(head_dim=128, causal=True, layout="bshd", arch="sm_90a"):
    spec = Spec(head_dim, head_dim, parse_dtype("float16"), causal)
    return Kernel(spec, parse_arch(arch), layout, "auto", False)


def array(seqlen, heads, head_dim, layout, batch=2):
    """Zeros that take no memory and lie at a multiple of 16 bytes."""
    shape = (batch, seqlen, heads, head_dim) if layout == "bshd" else (batch, heads, seqlen, head_dim)
    room = np.zeros(int(np.prod(shape)) + 16, np.float16)
    return room[-room.ctypes.data % 16 // 2 :][: int(np.prod(shape))].reshape(shape)


def bound(made, seqlen_q, heads, heads_kv, seqlen_k=100, stage="forward"):
    """The launch that such a call is prepared for."""
    dim = made.spec.head_dim
    q = array(seqlen_q, heads, dim, made.layout)
    k, v = (array(seqlen_k, heads_kv, dim, made.layout) for _ in "kv")
    arrays = {"q": q, "k": k, "v": v}
    call = made._bind(LIBRARIES["numpy"], stage, arrays, None)
    assert call is made._bind(LIBRARIES["numpy"], stage, arrays, None)
    return call.launches[0]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("seqlen_q", "group", "packed"), [(1, 8, 8), (1, 3, 1), (3, 2, 2), (17, 16, 16), (64, 8, 2), (4096, 8, 1)]
)
def test_few_queries_of_grouped_heads_share_a_tile(gpu, layout, causal, head_dim, seqlen_q, group, packed):
    launch = bound(kernel(head_dim, causal, layout), seqlen_q, 2 * group, 2)
    plan = launch.program.stages.plan
    assert (plan.packed, plan.arch.name) == (packed, "sm_90a")
    positions = plan.sizes["block_q"] // packed
    tiles = -(-seqlen_q // positions) * (2 * group // packed) * 2
    assert launch.grid == (min(tiles, 132 * plan.min_blocks), 1, 1)
    maps = {launch.program.tensors[index]: made for index, made in launch.maps.items()}
    assert maps["q"].box == (64, positions, packed) and maps["q"].sizes == (head_dim, seqlen_q, 2 * group, 2)
    assert maps["o"].box[1] * maps["o"].box[2] == 64
    assert maps["k"].box == (64, plan.sizes["block_kv"], 1) == maps["v"].box


def test_one_kernel_keeps_both_forms_apart(gpu):
    made = kernel()
    packed = [bound(made, seqlen_q, 8, 1).program.stages.plan.packed for seqlen_q in (1, 4096, 16, 1)]
    assert packed == [8, 1, 8, 8]
    assert bound(made, 1, 8, 1, seqlen_k=7).program is bound(made, 1, 8, 1, seqlen_k=70).program
    assert made.plan["attention_forward"].packed == 1, "sizes are not known before a call"


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_120")], ids=lambda x: str(x)
)
def test_other_families_do_not_pack(gpu, capability, arch):
    gpu["capability"] = capability
    made = kernel(arch=arch)
    made._pinned = True
    plan = bound(made, 1, 8, 1).program.stages.plan
    assert (plan.packed, plan.arch.name) == (1, arch)


def test_what_tma_cannot_read_does_not_pack(gpu):
    made = kernel()
    q, kv = array(1, 8, 128, "bshd"), array(100, 1, 128, "bshd")
    room = np.zeros(q.size + 16, np.float16)
    odd = room[-room.ctypes.data % 16 // 2 + 1 :][: q.size].reshape(q.shape)
    spread = np.broadcast_to(kv[:1], kv.shape)
    for arrays in ({"q": odd, "k": kv, "v": kv}, {"q": q, "k": spread, "v": kv}):
        plan = made._bind(LIBRARIES["numpy"], "forward", arrays, None).launches[0].program.stages.plan
        assert (plan.packed, plan.arch.name) == (1, "sm_90")


def test_no_queries_are_no_tiles(gpu):
    assert bound(kernel(), 0, 8, 1).grid[0] == 0
    assert bound(kernel(), 1, 8, 1, seqlen_k=0).grid == (2, 1, 1)


def test_the_limit_counts_tiles_of_several_heads(gpu):
    """As many heads again fit one launch as share a tile."""
    one, eight = (programs("forward", made, parse_arch("sm_90a"))[0] for made in specs(1, 8))
    sizes = {"seqlen_q": 1, "heads": 32768, "heads_kv": 4096, "group": 8, "batches": MAX_TILES // 32768 + 1}
    with pytest.raises(ValueError, match="tiles of queries exceed"):
        one._check_tiles({**one.stages.plan.sizes, **sizes})
    eight._check_tiles({**eight.stages.plan.sizes, **sizes})
    with pytest.raises(ValueError, match="tiles of queries exceed"):
        eight._check_tiles({**eight.stages.plan.sizes, **sizes, "batches": MAX_TILES // 4096 + 1})


def test_a_tile_never_reaches_into_another_group(gpu):
    (program,) = programs("forward", specs(8)[0], parse_arch("sm_90a"))
    with pytest.raises(ValueError, match="groups of 12 heads are no multiple of the 8 of a tile"):
        program._check_tiles({**program.stages.plan.sizes, "group": 12, "seqlen_q": 1, "heads": 24, "batches": 1})


def specs(*packed):
    return [Spec(128, 128, causal=True, packed=count) for count in packed]


def test_explain_says_that_calls_may_pack():
    assert "heads share a tile" in flashgen.compile(128, arch="sm_90a").explain()
    assert "heads share a tile" not in flashgen.compile(128, arch="sm_80").explain()
