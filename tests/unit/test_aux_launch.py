"""What kernels for gradients of arrays are launched with, by a made-up driver, where they are to repeat."""

import struct

import pytest
from test_host_cost import launched  # noqa: F401
from test_varlen_launch import bound  # noqa: F401

import flashgen

torch = pytest.importorskip("torch")


def relative(score, b, h, q_idx, kv_idx, table):
    return score + table[h, abs(q_idx - kv_idx)]


def magnitudes_and_integers(seen):
    """The last two launches: their arguments' arrays by name, as (address, strides and last indices), and the rest."""
    found = []
    for item, launches in seen[-2:]:
        (args,) = launches
        assert item.program.name == "attention_backward_aux"
        arrays = {}
        for offset, buffer in zip(item.offsets, (x for x in item.program.buffers if x.shape), strict=True):
            count = 2 * len(buffer.shape) if buffer.by_element else len(buffer.shape) - 1
            arrays[buffer.name] = struct.unpack_from(f"<{1 + count}q", args, offset)
        found.append((arrays, args))
    return found


@pytest.mark.parametrize("arch", ["sm_90a", "sm_90"])
def test_beside_dropout_both_kernels_are_told_the_seed(bound, arch):  # noqa: F811
    q, k, v = (torch.randn(2, 70, heads, 64).bfloat16() for heads in (4, 2, 2))
    table = torch.randn(4, 9, requires_grad=True)
    kernel = flashgen.compile(64, arch=arch, score_mod=relative, dropout=True, deterministic=True)
    o = kernel(q, k, v, score_aux=(table,), dropout_p=0.5, dropout_seed=0x123456789ABCDEF0)
    o.backward(torch.randn_like(o))
    (sums, first), (integers, second) = magnitudes_and_integers(bound)
    assert sums["sums"][1:3] == (4 * 70, 70) and "grad" not in sums
    assert integers["grad"][1:] == (9, 1, 3, 8)  # of int64, with the shape of the table
    assert integers["unit"][1:] == (1, 0) and "sums" not in integers
    assert all((0x123456789ABCDEF0).to_bytes(8, "little") in args for args in (first, second))
    assert table.grad.shape == (4, 9) and table.grad.dtype == torch.float32


@pytest.mark.parametrize("arch", ["sm_90a", "sm_90"])
def test_of_packed_sequences_each_finds_its_own(bound, arch):  # noqa: F811
    q, k, v = (torch.randn(100, heads, 64).bfloat16() for heads in (4, 2, 2))
    told = [torch.tensor([0, 30, 30, 100], dtype=torch.int32) for _ in range(2)]
    table = torch.randn(4, 9, requires_grad=True)
    kernel = flashgen.compile(64, arch=arch, score_mod=relative, varlen=True, deterministic=True)
    o = kernel(q, k, v, *told, score_aux=(table,))
    o.backward(torch.randn_like(o))
    for arrays, args in magnitudes_and_integers(bound):
        assert arrays["cu_seqlens_q"] == (told[0].data_ptr(), 1, 3) and arrays["cu_seqlens_k"][0] == told[1].data_ptr()
        assert arrays["q"][0] == q.data_ptr()
        assert arrays["lse_log2"][2] >= 100  # whole blocks
        assert struct.pack("<ii", 100, 100) in args  # total_q, total_k
    assert magnitudes_and_integers(bound)[0][0]["sums"][1:3] == (400, 100)
