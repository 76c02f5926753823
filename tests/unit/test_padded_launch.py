"""What kernels with `seqused_k` are launched with, by a made-up driver: tensor maps, their rows, and which family."""

import logging
import struct

import pytest
from test_host_cost import RUNTIME, launched  # noqa: F401
from test_varlen_launch import bound  # noqa: F401

import flashgen
from flashgen.runtime import tensormap
from flashgen.runtime.tensormap import LAST_ROW, through_batches

torch = pytest.importorskip("torch")


def call(arch="sm_90a", batch=3, lengths=(300, 100), heads=(4, 2), change=lambda x: x, **options):
    (seqlen_q, seqlen_k), used = lengths, torch.zeros(batch, dtype=torch.int32)
    q = torch.randn(batch, seqlen_q, heads[0], 128).bfloat16().requires_grad_()
    k, v = (change(torch.randn(batch, seqlen_k, heads[1], 128).bfloat16()).requires_grad_() for _ in "kv")
    kernel = flashgen.compile(128, True, arch=arch)
    o = kernel(q, k, v, seqused_k=used, **options)
    o.backward(torch.zeros_like(o))
    return used


@pytest.fixture
def maps(monkeypatch):
    """What every map of rows that may end anywhere is made of."""
    calls = []
    real = tensormap.TensorMap.of_sequences.__func__
    monkeypatch.setattr(tensormap.TensorMap, "of_sequences", classmethod(lambda *x: calls.append(x[2:5]) or real(*x)))
    return calls


def test_rows_of_k_and_v_are_counted_through_all_batches(bound, maps):  # noqa: F811
    call()
    assert maps and set(maps) == {((128, 300, 4), 256, 128)}, "heads of keys are not counted"
    for item, launches in bound:
        names = [scalar.name for scalar in item.program.stages.machine.scalars]
        first = len(item.template) - len(item.template) % 4
        if "k_batch_rows" in names:
            assert struct.pack("<2i", 100, 100) in launches[0][:first], "rows from batch to batch"


def test_slices_of_one_tensor_have_rows_between_their_own(bound, maps):  # noqa: F811
    """k is the first 100 of 160 rows of a cache, and beside it in each row lies something else."""
    call(change=lambda x: torch.zeros(3, 160, 2, 2, 128, dtype=torch.bfloat16)[:, :100, 0])
    assert set(maps) == {((128, 300, 4), 512, 128)}
    assert any(struct.pack("<2i", 160, 160) in args for _, args in ((item, b"".join(of)) for item, of in bound))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.new_zeros(3 * 100 * 256 + 16).as_strided(x.shape, (100 * 256 + 8, 256, 128, 1)), "whole number"),
        (lambda x: x[:1].expand(x.shape), "stride of zero"),
    ],
    ids=["no whole rows", "one batch for all"],
)
def test_other_batches_take_the_portable_kernels(bound, maps, caplog, change, reason):  # noqa: F811
    with caplog.at_level(logging.INFO, "flashgen"):
        call(change=lambda x: change(x).detach())
    assert not maps and reason in caplog.text and "the sm_90 kernels run" in caplog.text
    assert all(item.program.stages.plan.arch.family == "sm80" for item, _ in bound)


def test_where_rows_are_counted():
    """strides of batch, head and row; what has one batch or one row counts nothing."""
    assert through_batches((25600, 128, 256), 3, 100) == (256, 100)
    assert through_batches((25600, 12800, 128), 3, 100) == (128, 200)
    assert through_batches((7, 128, 256), 1, 100) == (256, 0)
    assert through_batches((512, 128, 8), 3, 1) == (512, 1)
    assert through_batches((25608, 128, 256), 3, 100) is None and through_batches((0, 128, 0), 3, 100) is None
    assert through_batches((256, 128, 256), LAST_ROW + 1, 2) is None


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_more_batches_than_a_grid_has_places(bound, arch):  # noqa: F811
    """Each launch is told where the numbers of its own batches begin."""
    used = call(arch, batch=70_000, lengths=(1, 2), heads=(1, 1))
    _, backward = next((item, of) for item, of in bound if item.program.name == "attention_backward")
    first, second = (used.data_ptr() + 4 * at for at in (0, 65535))
    assert len(backward) == 2
    assert struct.pack("<Q", first) in backward[0] and struct.pack("<Q", second) in backward[1]


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_what_looks_for_reads_is_told_the_sizes_of_the_array(bound, arch, kind):  # noqa: F811
    q, k, v = (torch.randn(3, rows, 2, 64).bfloat16() for rows in (70, 150, 150))
    ids = torch.zeros(3, 177, dtype=torch.int32)
    kernel = flashgen.compile(64, False, varlen=kind == "packed", mask_mod=flashgen.masks.document, arch=arch)
    given = {"seqused_k": torch.ones(3, dtype=torch.int32)} if kind == "padded" else {}
    told = ()
    if kind == "packed":
        told = tuple(torch.arange(4, dtype=torch.int32) * rows for rows in (70, 150))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    kernel(q, k, v, *told, mask_aux=(ids,), check=True, **given)
    (looks, launches), (forward, _) = bound
    assert (looks.program.name, forward.program.name) == ("attention_reads", "attention_forward")
    assert looks.grid == (210 // 64 + 3 if kind == "packed" else 3 * 2, 2, 1)
    assert struct.pack("<2i", 3, 177) in launches[0], "the sizes of ids"
    assert ids.data_ptr().to_bytes(8, "little") in launches[0]
