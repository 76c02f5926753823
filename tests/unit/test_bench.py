"""The benchmark without a GPU: the grid, the statistics, and the harness with a fake clock and fake peers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner
from rich.console import Console

from flashgen.bench import grid, peers, report, run, variants
from flashgen.bench.grid import Cell

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads only get in each other's way
from flashgen.bench import measure  # noqa: E402  (imports torch)

# --- grid -------------------------------------------------------------------------------------------------------------


def test_grid_holds_data_constant_and_counts_flops():
    assert len(grid.cells("full")) == 72
    assert len(grid.cells("spine")) == 32
    for cell in grid.cells("full"):
        assert cell.batch * cell.seqlen == 16384
        assert cell.heads * cell.head_dim == 2048
    full = Cell("fwd", 128, False, 16384)
    assert full.shape == (1, 16384, 16, 128)
    assert full.flops == 4 * 1 * 16 * 16384 * 16384 * 128
    assert Cell("fwd", 128, True, 16384).flops * 2 == full.flops
    assert Cell("bwd", 128, False, 16384).flops * 2 == full.flops * 5


def test_grid_axes_replace_those_of_the_preset():
    chosen = grid.cells("spine", ["bwd"], head_dims=[256], causal=[False], seqlens=[512, 100000])
    assert [str(cell) for cell in chosen] == ["bwd d256 full 512", "bwd d256 full 100000"]
    assert chosen[1].batch == 1
    with pytest.raises(ValueError, match="unknown preset 'huge': choose one of spine"):
        grid.cells("huge")
    with pytest.raises(ValueError, match="unknown direction"):
        grid.cells("spine", ["sideways"])


# --- peers ------------------------------------------------------------------------------------------------------------


def test_roster_and_choice(monkeypatch):
    assert [peer.name for peer in peers.roster()] == ["flashgen", "fa2", "cudnn", "flex", "varlen", "fa3", "fa4"]
    for peer in peers.roster():
        assert isinstance(peer.available(), str)
    with pytest.raises(ValueError, match="unknown peer 'fa9'"):
        peers.choose(["fa9"])
    missing = peers.Fa3()
    missing.module = "no_such_module_here"
    monkeypatch.setattr(peers, "roster", lambda: [FakePeer("a"), peers.Flex(), missing])
    chosen, reasons = peers.choose()
    assert [peer.name for peer in chosen] == ["a"]  # flex is off unless asked for
    assert reasons == {"fa3": "fa3-fwd is not installed"}


def test_peer_limits_are_said():
    assert peers.Fa3().supports(Cell("bwd", 64, True, 512)) == "forward only"
    assert peers.Fa4().supports(Cell("fwd", 512, True, 512)) == "head_dim at most 256"
    assert not peers.Fa4().supports(Cell("bwd", 128, True, 512))


def test_sdpa_peer_gets_views_and_gives_bshd():
    peer = peers.Sdpa("math", "math", "MATH")
    q, k, v = (torch.randn(2, 16, 3, 8) for _ in range(3))
    assert peer.adapt(q).data_ptr() == q.data_ptr()
    o = peer.forward(q, k, v, causal=True)
    assert o.shape == q.shape
    assert torch.allclose(o[:, 0], v[:, 0], atol=1e-6)  # the first query sees the first key alone


# --- measure ----------------------------------------------------------------------------------------------------------


class FakePeer(peers.Peer):
    """Attention by torch; `wrong` scales the output, `raises` fails when it is bound."""

    def __init__(self, name: str, wrong: float = 1.0, raises: str = "", backward: bool = True) -> None:
        self.name = self.title = name
        self.wrong, self.raises, self.backward, self.calls = wrong, raises, backward, 0

    def version(self) -> str:
        return f"{self.name} 1.0"

    def available(self) -> str:
        return ""

    def bind(self, cell):
        if self.raises:
            raise RuntimeError(self.raises + "\nand a second line")

        def attend(q, k, v):
            self.calls += 1
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)
            return o.transpose(1, 2) * self.wrong

        return attend


class FakeClock:
    """Says that every launch takes some milliseconds, a different number each time."""

    def __init__(self, times=(1.0,)) -> None:
        self.times, self.asked, self.broken = times, 0, False

    def time(self, launch, count):
        self.asked += 1
        return self.times[self.asked % len(self.times)], launch()

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")


class FakeHeater:
    def __init__(self, *_):
        self.rates = 0

    def rate(self, launches=20):
        self.rates += 1
        return 700.0

    def settle(self):
        return 790.0, 700.0


@pytest.fixture
def small(monkeypatch):
    """Cells of 64 tokens and 32 channels."""
    monkeypatch.setattr(grid, "TOKENS", 64)
    monkeypatch.setattr(grid, "CHANNELS", 32)
    monkeypatch.setattr(measure, "CHANNELS", 32)
    variants.modification.cache_clear()  # the cells of one test have other sizes than those of another


def harness(clock=None, rounds=5):
    return measure.Harness(clock or FakeClock(), FakeHeater(), "cpu", rounds)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_harness_times_right_peers_and_refuses_the_others(small, direction):
    cell = Cell(direction, 16, True, 32)
    entrants = [
        FakePeer("flashgen"),
        FakePeer("wrong", wrong=1.1),
        FakePeer("nan", wrong=float("nan")),
        FakePeer("broken", raises="no kernel"),
        FakePeer("half", backward=False),
    ]
    answer = harness(FakeClock((2.0, 4.0))).measure(cell, entrants)
    results = answer["results"]
    assert len(results["flashgen"]["rounds_ms"]) == 5
    assert results["flashgen"]["launches"] in (3, 6)
    assert results["flashgen"]["ms"] in (2.0, 4.0)
    assert results["flashgen"]["tflops"] == pytest.approx(cell.flops / results["flashgen"]["ms"] / 1e9)
    assert results["flashgen"]["error"] < 1e-2
    assert results["wrong"]["failed"].startswith("wrong result: relative error 0.1")
    assert results["nan"]["failed"].startswith("wrong result: relative error nan")
    assert results["broken"] == {"failed": "RuntimeError: no kernel"}
    assert (results["half"] == {"skipped": "forward only"}) == (direction == "bwd")
    assert (answer["batch"], answer["heads"], answer["flops"]) == (2, 2, cell.flops)
    json.dumps(answer)


class ClockByName:
    """Each launch takes what its peer's name says, and is counted."""

    def __init__(self):
        self.names, self.counts = {}, {}

    def time(self, launch, count):
        result = launch()
        name = launch.peer.name
        self.counts.setdefault(name, []).append(count)
        return float(name), result

    def synchronize(self):
        pass


def test_a_glance_says_who_is_worth_rounds(small, monkeypatch):
    original = measure.launcher

    def launcher(peer, cell, inputs):
        launch = original(peer, cell, inputs)
        launch.peer = peer
        return launch

    monkeypatch.setattr(measure, "launcher", launcher)
    clock = ClockByName()
    crowd = [FakePeer(name) for name in ("1.0", "1.09", "1.2", "3.0", "0.5")]
    crowd[-1].wrong = 2.0
    answer = harness(clock).measure(Cell("fwd", 16, True, 32), crowd, margin=0.1, kept=["3.0"])
    rounds = {name: len(record.get("rounds_ms", ())) for name, record in answer["results"].items()}
    assert rounds == {"1.0": 5, "1.09": 5, "1.2": 0, "3.0": 5, "0.5": 0}
    assert answer["results"]["1.2"] == {"glance_ms": 1.2} and answer["results"]["1.0"]["glance_ms"] == 1.0
    assert clock.counts["1.2"] == [2, 2, 2] and clock.counts["1.0"] == [2, 2, 3, *[12] * 5]
    assert "glance_ms" not in harness(clock).measure(Cell("fwd", 16, True, 32), crowd)["results"]["1.0"]


def test_harness_sees_a_kernel_that_is_wrong_later(small):
    peer = FakePeer("flaky")
    original = peer.bind

    def bind(cell):
        attend = original(cell)
        return lambda q, k, v: attend(q, k, v) * (2.0 if peer.calls > 3 else 1.0)

    peer.bind = bind
    answer = harness().measure(Cell("fwd", 16, False, 32), [peer])
    assert answer["results"]["flaky"]["failed"].startswith("wrong result")


def test_harness_stops_when_the_device_is_lost(small):
    clock = FakeClock()
    clock.broken = True
    with pytest.raises(RuntimeError, match="bad broke the CUDA context"):
        harness(clock).measure(Cell("fwd", 16, False, 32), [FakePeer("bad", raises="illegal address")])


def test_harness_shuffles_by_seed(small):
    def order(seed):
        seen = []
        crowd = [FakePeer(name) for name in "abcdef"]
        one = measure.Harness(FakeClock(), FakeHeater(), "cpu", 5, seed)
        one._round = lambda competitor, last: (
            seen.append(competitor.peer.name) or last.update({competitor.peer.name: ()})
        )
        one._race([measure.Competitor(peer, launch=lambda: ()) for peer in crowd], ())
        return seen

    assert order(1) == order(1) != order(2)
    assert all(sorted(order(1)[start : start + 6]) == list("abcdef") for start in range(0, 30, 6))


def test_host_time(small):
    peer = FakePeer("flashgen")
    times = dict(harness().host_us([peer, FakePeer("broken", raises="no")], 16, True))
    assert list(times) == ["flashgen"]
    assert times["flashgen"] > 0
    assert peer.calls == 600


def test_compare_sees_one_wrong_row():
    wanted = torch.randn(1, 1000, 4, 16)
    output = wanted.clone()
    output[0, 3, 2] = 0
    norm, row = measure.compare([output], [wanted])
    assert norm < measure.NORM_TOLERANCE * 2
    assert row > measure.ROW_TOLERANCE
    output[0, 3, 2, 0] = float("nan")
    assert all(value != value for value in measure.compare([output], [wanted]))
    assert measure.compare([output[:, :1]], [wanted]) == (float("inf"), float("inf"))


def test_small_statistics():
    assert measure.launches_for(5.0) == 3
    assert measure.launches_for(100.0) == 1
    assert measure.launches_for(0.0) == measure.MAX_LAUNCHES
    assert measure.settled([700.0] * 20)
    assert not measure.settled([700.0] * 19)
    assert not measure.settled([790.0] * 10 + [700.0] * 10)


def test_heater_on_the_cpu():
    heater = measure.Heater(FakeClock((0.5,)), "cpu", size=16)
    assert heater.rate() == pytest.approx(2 * 16**3 / 0.5 / 1e9)
    assert heater.settle(at_least_s=0.0, at_most_s=5.0) == (heater.rate(), heater.rate())
    assert heater.c.abs().sum() > 0


# --- run --------------------------------------------------------------------------------------------------------------


ENVIRONMENT = {"card": "Fake", "multiprocessors": 1, "driver": "1", "cuda": "13.0", "torch": "2"}


@pytest.fixture
def fake_card(small, monkeypatch):
    """A machine whose GPU, clock and peers are fakes."""
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(measure, "CudaClock", FakeClock)
    monkeypatch.setattr(measure, "Heater", FakeHeater)
    monkeypatch.setattr(measure, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(peers, "roster", lambda: [FakePeer("flashgen"), FakePeer("fa2"), FakePeer("flex")])


def test_command_end_to_end(fake_card, tmp_path):
    arguments = ["--head-dim", "16", "--seqlen", "16", "--seqlen", "32", "--causal", "--out", str(tmp_path)]
    answer = CliRunner().invoke(run.command, arguments)
    assert answer.exit_code == 0, answer.output
    results = report.load(tmp_path / "bench.json")
    assert [report.label(cell) for cell in results["cells"]] == [
        "fwd d16 causal 16",
        "fwd d16 causal 32",
        "bwd d16 causal 16",
        "bwd d16 causal 32",
    ]
    assert results["cublas_tflops"] == {"cold": 790.0, "before": 700.0, "after": 700.0}
    assert set(results["host_us"]) == {"d16 causal"}
    assert results["summary"]["fwd"]["fa2"] == pytest.approx(1.0)
    assert results["date"].endswith("UTC")
    assert "TFLOP/s" in (tmp_path / "bench.txt").read_text()


def test_command_fails_when_flashgen_does(fake_card, monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "roster", lambda: [FakePeer("flashgen", wrong=2.0), FakePeer("fa2")])
    monkeypatch.setattr(run, "plot", lambda results, path: None)
    answer = CliRunner().invoke(
        run.command, ["--preset", "quick", "--head-dim", "16", "--seqlen", "16", "--out", str(tmp_path)]
    )
    assert answer.exit_code == 1
    assert "flashgen failed in 4 of 4 cells" in answer.output


def test_interrupted_run_keeps_what_it_has(fake_card, monkeypatch, tmp_path):
    original = measure.Harness.measure

    def interrupted(self, cell, entrants):
        if cell.seqlen == 32:
            raise KeyboardInterrupt
        return original(self, cell, entrants)

    monkeypatch.setattr(measure.Harness, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run("quick", head_dims=[16], seqlens=[16, 32], out=tmp_path, console=Console(file=io.StringIO()))
    assert len(report.load(tmp_path / "bench.json")["cells"]) == 1


def test_errors_are_one_sentence(fake_card, monkeypatch):
    answer = CliRunner().invoke(run.command, ["--peers", "flashgen,fa9"])
    assert answer.exit_code == 1
    assert answer.output == "Error: unknown peer 'fa9': choose from flashgen, fa2, flex\n"
    assert CliRunner().invoke(run.command, ["--rounds", "3"]).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said():
    answer = CliRunner().invoke(run.command, [])
    assert answer.exit_code == 1
    assert answer.output.startswith("Error: The benchmark times kernels on an NVIDIA GPU and torch sees none here")


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from flashgen.bench.run import command; command(['--help'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "--preset" in answer.stdout


# --- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [24, 32])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("variant", list(variants.VARIANTS))
def test_a_variant_is_what_its_functions_of_torch_tensors_say(small, monkeypatch, variant, direction, seqlen):
    """flashgen's options, on the interpreter, against the definition; the unmodified attention is told from it."""
    monkeypatch.setattr(variants, "WINDOW", 4)
    monkeypatch.setattr(variants, "DOCUMENTS", 3)
    lengths = [seqlen, 1, 17]
    monkeypatch.setattr(variants, "packed_lengths", lambda: lengths)
    total = next(iter(variants.own_seqlens(variant)), seqlen)
    cell = Cell(direction, 16, variants.CAUSAL[variant], total, variant)
    plain = FakePeer("plain")
    plain.variants = (variant,)
    monkeypatch.setattr(variants, "SOFTCAP", 0.5)  # or random scores would be nearly the same
    results = harness().measure(cell, [peers.Flashgen(), plain, FakePeer("no")])["results"]
    assert len(results["flashgen"]["rounds_ms"]) == 5
    assert results["plain"]["failed"].startswith("wrong result")
    assert results["no"]["skipped"] == f"no {variant}"


def test_flops_of_a_variant_are_of_what_is_seen(monkeypatch):
    monkeypatch.setattr(grid, "TOKENS", 4096)
    monkeypatch.setattr(variants, "packed_lengths", lambda: [2000, 1, 595, 1500])
    for name, causal in variants.CAUSAL.items():
        cell = Cell("fwd", 64, causal, 4096, name)
        dense = torch.ones(4096, 4096, dtype=torch.bool)
        sees = variants.modification(cell, "cpu").mask
        place = torch.arange(4096)
        if sees:
            dense &= sees(0, 0, place[:, None], place[None, :])
        if causal:
            dense &= place[:, None] >= place[None, :]
        assert abs(cell.flops / (4 * 32 * 64 * int(dense.sum())) - 1) < 0.01
        assert str(cell) == f"fwd d64 {'causal' if causal else 'full'} {name} 4096"


def test_cells_of_variants_have_the_mask_that_goes_with_them():
    made = grid.cells("quick", variants=["bias", "window"])
    assert [(cell.direction, cell.causal, cell.variant) for cell in made] == [
        ("fwd", False, "bias"), ("fwd", True, "window"), ("bwd", False, "bias"), ("bwd", True, "window"),
    ]  # fmt: skip
    assert not any(peers.Sdpa("fa2", "", "").supports(cell) == "" for cell in made)
    assert [peers.Fa4().supports(cell) for cell in made[:2]] == ["no bias", ""]


# --- packed sequences -------------------------------------------------------------------------------------------------


def test_packed_sequences_are_always_the_same_in_one_row():
    made = grid.cells("spine", ["fwd"], head_dims=[64, 256], seqlens=[512, 4096], variants=["packed", "softcap"])
    assert [(cell.variant, cell.seqlen) for cell in made] == [
        *(("packed", 148553), ("softcap", 512), ("softcap", 4096)),
        *(("packed", 148553), ("softcap", 512), ("softcap", 4096)),
    ]
    assert made[0].shape == (1, 148553, 32, 64)
    lengths = variants.packed_lengths()
    assert len(lengths) == 64 and min(lengths) >= 32 and max(lengths) <= 4096
    assert made[0].flops == 4 * 2048 * (sum(length**2 for length in lengths) // 2)


def by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    """What the packages' functions for packed sequences do, by torch."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert q.dim() == k.dim() == v.dim() == 3
    lengths = cu_seqlens_q.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*part, is_causal=causal) for part in parts], dim=1).transpose(0, 1)


def told_by_is_causal(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    return by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)


def told_by_window(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    causal = {(-1, 0): True, (-1, -1): False}[window_size]
    return by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal)


def module_of(**functions):
    made = types.ModuleType("packed_by_torch")
    vars(made).update(functions)
    return made


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("attend", [told_by_is_causal, told_by_window], ids=lambda attend: attend.__name__)
def test_peers_of_packed_sequences(small, monkeypatch, attend, direction):
    """The calls that the harness makes, into functions of the packages' signatures, against the definition."""
    monkeypatch.setattr(variants, "packed_lengths", lambda: [40, 1, 17])
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module_of(varlen_attn=attend))
    fa = module_of(flash_attn_varlen_func=lambda *args, **named: (by_sequence(*args, **named), None))
    monkeypatch.setitem(sys.modules, "packed_by_torch", fa)
    monkeypatch.setattr(peers.Fa3, "module", "packed_by_torch")
    monkeypatch.setattr(peers.Fa4, "module", "packed_by_torch")
    cell = Cell(direction, 16, True, 58, "packed")
    entrants = [peers.TorchVarlen(), peers.Fa3(), peers.Fa4(), FakePeer("dense")]
    results = harness().measure(cell, entrants)["results"]
    assert results["varlen"]["error"] < 0.01 and results["fa4"]["error"] < 0.01
    assert results["fa3"].get("skipped", "") == ("forward only" if direction == "bwd" else "")
    assert results["dense"]["skipped"] == "no packed"
    full = harness().measure(Cell(direction, 16, False, 58, "packed"), entrants)["results"]
    assert full["varlen"]["error"] < 0.01 and full["fa4"]["error"] < 0.01


def test_torch_varlen_is_for_packed_sequences_only():
    assert peers.TorchVarlen().supports(Cell("fwd", 64, True, 4096)) == "packed sequences only"
    assert peers.TorchVarlen().supports(Cell("fwd", 64, True, 4096, "document")) == "no document"


def test_flex_is_kept_from_a_bias_that_it_cannot_address():
    said = "flex addresses captured arrays with 32 bits"
    for head_dim, seqlen, reason in [(128, 8192, ""), (128, 16384, said), (64, 4096, ""), (64, 8192, said)]:
        assert peers.Flex().supports(Cell("fwd", head_dim, False, seqlen, "bias")) == reason
    assert not peers.Flex().supports(Cell("fwd", 128, True, 16384, "alibi"))
