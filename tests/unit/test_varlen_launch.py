"""What kernels for packed sequences are launched with, by a made-up driver."""

import struct

import pytest
from test_host_cost import launched  # noqa: F401

import flashgen
from flashgen.runtime import program, tensormap

torch = pytest.importorskip("torch")


@pytest.fixture
def bound(monkeypatch, launched):  # noqa: F811
    """Every program that is launched, with its grid and its arguments."""
    seen = []
    real = program.Bound._launch

    def launch(self, pointers, stream, device, drop):
        before = len(launched)
        real(self, pointers, stream, device, drop)
        seen.append((self, launched[before:]))

    monkeypatch.setattr(program.Bound, "_launch", launch)
    return seen


def call(arch, queries=(5, 0, 300), keys=(7, 100, 3), heads=(4, 2), **options):
    of_q, of_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys))
    shapes = (sum(queries), heads[0]), (sum(keys), heads[1]), (sum(keys), heads[1])
    q, k, v = (torch.randn(*shape, 128, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    kernel = flashgen.compile(128, True, varlen=True, arch=arch)
    o = kernel(q, k, v, of_q, of_k, **options)
    o.backward(torch.randn_like(o))
    return kernel, (q, k, v)


def scalars(args, stages):
    """The numbers at the end of the arguments, by name."""
    items = stages.machine.scalars
    size = 4 * len(items)
    first = next(at for at in range(len(args) - size, -1, -4) if struct.unpack_from("<i", args, at)[0] == 305)
    values = struct.unpack_from(
        "<" + "".join("f" if item.dtype.name == "float32" else "i" for item in items), args, first
    )
    return dict(zip((item.name for item in items), values, strict=True))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_90"])
def test_every_kernel_is_told_the_totals_and_the_number_of_sequences(bound, arch):
    kernel, _ = call(arch)
    assert [item.program.name for item, _ in bound] == list(kernel.plan)
    for item, launches in bound:
        stages = item.program.stages
        assert len(launches) == 1
        found = scalars(launches[0], stages)
        assert (found["total_q"], found["total_k"], found["batches"], found["group"]) == (305, 110, 3, 2)
        if "padding" in found:
            assert found["padding"] == kernel.plan["attention_backward"].sizes["block_q"]
        assert item.program.tensors[-1] in ("cu_seqlens_q", "cu_seqlens_k")


def test_the_grid_has_room_for_every_block_and_one_more_a_sequence(bound):
    kernel, _ = call("sm_90")
    for item, _ in bound:
        plan = kernel.plan[item.program.name]
        keys = item.program.name == "attention_backward"
        rows, total, heads = ("block_kv", 110, 2) if keys else ("block_q", 305, 4)
        assert item.grid == (total // plan.sizes[rows] + 3, heads, 1)


def test_tens_of_thousands_of_sequences_are_one_launch(bound):
    kernel, _ = call("sm_90a", (1,) * 70_000, (1,) * 70_000, (1, 1))
    assert all(len(launches) == 1 for _, launches in bound)
    backward = next(item for item, _ in bound if item.program.name == "attention_backward")
    rows = kernel.plan["attention_backward"].sizes["block_kv"]
    assert backward.grid == (70_000 // rows + 70_000, 1, 1)


def test_tma_sees_rows_that_may_end_anywhere(bound, monkeypatch):
    calls = []
    real = tensormap.TensorMap.of_sequences.__func__
    monkeypatch.setattr(tensormap.TensorMap, "of_sequences", classmethod(lambda *x: calls.append(x[1:]) or real(*x)))
    call("sm_90a", (9, 300), (9, 300))
    assert ("bfloat16", (128, 309, 4), 512, 128, (64, 128, 1)) in calls
    assert ("bfloat16", (128, 309, 4), 256, 128, (64, 128, 1)) in calls, "of keys, whose heads are not counted"


def test_no_rows_are_no_launch(bound):
    call("sm_90a", (0, 0), (3, 0))
    names = [item.program.name for item, launches in bound if launches]
    assert names == ["attention_backward"], "dK and dV are zero"


def test_a_hint_of_few_queries_packs_heads(bound):
    call("sm_90a", (1, 1), (300, 40), (16, 2), max_seqlen_q=1)
    assert bound[0][0].program.stages.plan.packed == 8, "under autograd too"
    with torch.no_grad():
        call_forward = flashgen.compile(128, True, varlen=True, arch="sm_90a")
        q, k = torch.randn(2, 16, 128).bfloat16(), torch.randn(340, 2, 128).bfloat16()
        told = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 300, 340]).int()
        call_forward(q, k, k, *told, max_seqlen_q=1)
        assert bound[-1][0].program.stages.plan.packed == 8
        call_forward(q, k, k, *told)
        assert bound[-1][0].program.stages.plan.packed == 1
