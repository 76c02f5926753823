"""Counters of persistent launches, against a made-up runtime: who shares one, who must not."""

from types import SimpleNamespace

import pytest

from flashgen.runtime import tile_counters


class FakeRuntime:
    def __init__(self):
        self.capturing, self.allocated, self.cleared = set(), [], []

    def streamIsCapturing(self, stream):
        return stream in self.capturing

    def malloc(self, size):
        assert not self.capturing, "no memory may be asked for while a stream is captured"
        self.allocated.append(size)
        return 2**20 * len(self.allocated)

    def memset(self, address, value, size):
        assert value == 0
        self.cleared.append((address, size))

    def deviceSynchronize(self):
        pass


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(tile_counters, "runtime", lambda: fake)
    monkeypatch.setattr(tile_counters, "stream_number", lambda stream: stream)
    monkeypatch.setattr(tile_counters, "_known", {})
    monkeypatch.setattr(tile_counters, "COUNT", 8)
    return fake


def test_launches_on_one_stream_share_a_counter_and_those_on_others_do_not(runtime):
    first = tile_counters.address(7, 0)
    assert tile_counters.address(7, 0) == first
    others = {tile_counters.address(8, 0), tile_counters.address(0, 0), tile_counters.address(7, 1)}
    assert len(others) == 3 and first not in others
    assert all(size == 32 for size in runtime.allocated) and runtime.cleared


def test_the_legacy_stream_has_two_handles_and_the_driver_is_not_asked(runtime, monkeypatch):
    per_thread = tile_counters.address(2, 0)
    monkeypatch.setattr(tile_counters, "stream_number", lambda stream: pytest.fail("asked"))
    assert tile_counters.address(0, 0) == tile_counters.address(1, 0) != per_thread


def test_each_captured_launch_has_a_counter_of_its_own(runtime):
    own = tile_counters.address(7, 0)
    runtime.capturing.add(7)
    captured = [tile_counters.address(7, 0) for _ in range(4)]
    assert len({own, *captured}) == 5
    runtime.capturing.clear()
    assert tile_counters.address(7, 0) == own


def test_more_are_made_outside_of_a_capture_and_a_capture_says_when_there_are_none(runtime):
    tile_counters.address(7, 0)
    runtime.capturing.add(7)
    with pytest.raises(RuntimeError, match="no counter is left for a captured launch; launch once outside"):
        for _ in range(20):
            tile_counters.address(7, 0)
    runtime.capturing.clear()
    tile_counters.address(9, 0)
    assert len(runtime.allocated) == 2


def test_a_handle_that_is_given_again_is_another_stream(runtime, monkeypatch):
    first = tile_counters.address(7, 0)
    monkeypatch.setattr(tile_counters, "stream_number", lambda stream: 1000 + stream)
    assert tile_counters.address(7, 0) != first


def test_a_bound_kernel_passes_the_counter_of_its_stream(runtime, monkeypatch):
    from flashgen import build
    from flashgen.plan.arch import parse_arch
    from flashgen.runtime.program import Program
    from flashgen.spec import Spec

    program = Program(build.forward(Spec(64, 64, causal=True), parse_arch("sm_90a"))[0])
    scalars = {"seqlen_q": 500, "seqlen_k": 500, "heads": 2, "heads_kv": 2, "group": 1, "batches": 3}
    scalars |= {"head_dim": 64, "head_dim_v": 64}
    strides = dict.fromkeys("qkvo", (64000, 64, 128)) | {"lse": (1000, 500)}
    bound = program.bind(strides, scalars | {"scale": 1.0, "scale_log2": 1.0, "multiprocessors": 132, "zero": 0})
    assert bound.grid == (3 * 2 * 3, 1, 1) and program.tensors == ["q", "k", "v", "o", "lse"]
    launched = []
    launcher = SimpleNamespace(launch_here=lambda grid, args, stream, device: launched.append(args))
    program.__dict__["launcher"] = launcher
    monkeypatch.setattr("flashgen.runtime.tensormap.TensorMap.at", lambda self, address: bytes(128))
    monkeypatch.setattr("flashgen.runtime.launch.context_device", lambda: 0)
    bound.launch((0, 0, 0, 0, 2**30), 7, 0)
    assert tile_counters.address(7, 0).to_bytes(8, "little") in launched[0]


def test_more_tiles_than_32_bits_count_are_refused():
    from flashgen import build
    from flashgen.plan.arch import parse_arch
    from flashgen.runtime.program import Program
    from flashgen.spec import Spec

    program = Program(build.forward(Spec(64, 64), parse_arch("sm_90a"))[0])
    sizes = {"seqlen_q": 10**6, "seqlen_k": 1, "heads": 1000, "heads_kv": 1000, "group": 1, "batches": 1000}
    more = {"scale": 1.0, "scale_log2": 1.0, "multiprocessors": 132, "zero": 0}
    with pytest.raises(ValueError, match=r"tiles of queries exceed the \d+ of one launch; split the batch"):
        program.bind(dict.fromkeys("qkvo", (1, 1, 1)) | {"lse": (1, 1)}, sizes | more)


def test_more_blocks_of_keys_than_a_grid_has_room_for_are_refused():
    from flashgen import build
    from flashgen.plan.arch import parse_arch
    from flashgen.runtime.program import Program
    from flashgen.spec import Spec

    program = Program(build.backward(Spec(64, 64), parse_arch("sm_90a"))[1])
    sizes = {"seqlen_q": 64, "seqlen_k": 65536 * 128, "heads": 1, "heads_kv": 1, "group": 1, "batches": 1}
    more = {"scale": 1.0, "scale_log2": 1.0, "multiprocessors": 132, "zero": 0, "seqlen_q_padded": 128}
    more |= {"head_dim": 64, "head_dim_v": 64}
    strides = dict.fromkeys((*"qkv", "dout", "dk", "dv", "dq_workspace"), (1, 1, 1))
    strides |= dict.fromkeys(("lse_log2", "delta"), (1, 1))
    with pytest.raises(
        ValueError, match="kv_block has 65536 places, more than the 65535 of a grid; split the sequence"
    ):
        program.bind(strides, sizes | more)
