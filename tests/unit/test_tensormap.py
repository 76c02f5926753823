"""What the driver is asked when TMA gets the description of an array; no GPU."""

import ctypes

import pytest

from flashgen.runtime import tensormap
from flashgen.runtime.tensormap import MAP_BYTES, TensorMap


class Driver:
    """Writes the address into the map, as the hardware's form begins, and keeps the other arguments."""

    def __init__(self, result=0):
        self.calls, self.result = [], result

    def cuTensorMapEncodeTiled(self, target, kind, rank, address, sizes, strides, box, steps, *kinds):
        self.calls.append((kind, rank, list(sizes), list(strides), list(box), list(steps), kinds, target.value % 64))
        ctypes.memset(target.value, 7, MAP_BYTES)
        return self.result


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(tensormap, "libcuda", lambda: fake)
    return fake


def test_the_array_is_described_in_bytes(driver):
    encoded = TensorMap("bfloat16", (40, 300, 4, 2), (160, 40, 48000), (64, 16, 8)).at(4096)
    assert encoded == bytes([7]) * MAP_BYTES
    kind, rank, sizes, strides, box, steps, kinds, misaligned = driver.calls[0]
    assert (kind, rank, misaligned) == (9, 4, 0)
    assert sizes == [40, 300, 4, 2] and strides == [320, 80, 96000] and box == [64, 16, 8, 1] and steps == [1] * 4
    assert kinds == (0, 3, 3, 0), "no interleaving, swizzle of 128 bytes, lines of 256 into L2, zeros out of range"


def test_an_address_is_encoded_once_and_the_memory_is_bounded(driver):
    map_ = TensorMap("float16", (64, 8, 1, 1), (64, 512, 512), (64, 64, 1))
    for _ in range(2):
        map_.at(1024)
    assert len(driver.calls) == 1
    for address in range(1, 3 * tensormap.KEPT):
        map_.at(address * 1024)
    assert len(map_._known) <= tensormap.KEPT


def test_strides_of_single_elements_and_empty_arrays_are_no_error(driver):
    map_ = TensorMap("float16", (8, 0, 1, 1), (3, 5, 7), (64, 64, 1))
    assert map_.at(0) == bytes(MAP_BYTES) and not driver.calls
    map_.at(1024)
    assert driver.calls[0][2:4] == ([8, 1, 1, 1], [16, 16, 16])


def test_a_refusal_names_the_array(driver):
    driver.result = 1
    with pytest.raises(RuntimeError, match=r"refuses a tensor map \(error 1\) for TensorMap\(dtype='float16'"):
        TensorMap("float16", (8, 1, 1, 1), (8, 8, 8), (64, 64, 1)).at(16)


def test_rows_of_packed_sequences_may_end_anywhere(driver):
    """Coordinates of the device code give the address of the row, and what is behind the end is out of range."""
    TensorMap.of_sequences("bfloat16", (128, 1000, 4), 1536, 128, (64, 128, 1)).at(4096)
    _, rank, sizes, strides, box, *_ = driver.calls[0]
    last = tensormap.LAST_ROW
    assert (rank, box) == (5, [64, 128, 1, 1, 1]) and sizes == [128, last, 4, 2**31 - 2**16, 2**31 - 2**16]
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides)
    for row, rows, head in ((0, 1000, 0), (700, 3, 2), (999, 1, 3), (500, 0, 1), (500, -120, 1)):
        place = (last - rows, head, row + rows, last)
        assert all(0 <= index < 2**31 for index in place)
        steps = [index * stride for index, stride in zip(place, strides, strict=True)]
        assert sum(steps) % 2**64 == (row * 1536 + head * 128) * 2
        inside = [at for at in range(128) if place[0] + at < sizes[1]]
        assert len(inside) == max(min(rows, 128), 0)


def test_a_single_row_has_any_stride(driver):
    TensorMap.of_sequences("bfloat16", (128, 1, 1), 3, 5, (64, 128, 1)).at(4096)
    assert all(stride % 16 == 0 for stride in driver.calls[0][3])
