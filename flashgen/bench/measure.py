"""How the clock is read.

A card of this size is capped by power, not by clocks: it is faster when cold, and whoever is measured first or after a
light neighbour gains up to 10 percent. So the card is preheated with matrix products until its rate settles, heated
again before each cell (checking and compiling let it cool), the competitors of a cell take turns in a shuffled order,
and each is judged by the median of its rounds. Rounds are so short that all run at nearly the same clock; `sustained_s`
shows each at the clock that its own power allows. Before its rounds a competitor's result is compared with torch's own
attention, and after them once more: a kernel that is wrong, or wrong now and then, is reported and not ranked.

Inputs are random, never zeros (zeros draw less power). q, k and v of a cell take 192 MiB together, several times the
L2 cache of any card so far (packed sequences more), so launches do not find their inputs in the cache and need not
rotate among input sets.
"""

from __future__ import annotations

import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from flashgen.bench.grid import CHANNELS, Cell
from flashgen.bench.peers import Peer, first_line
from flashgen.bench.variants import modification

ROUND_MS = 12.0  # the least time of one round; an event is good to about a microsecond
GLANCE = 4  # the part of a round that shows which of many are worth rounds
MAX_LAUNCHES = 200
NORM_TOLERANCE = 0.02  # two bf16 kernels differ by 3e-3 to 6e-3 in |x - ref| / |ref|
ROW_TOLERANCE = 0.25  # the same for the worst (batch, position, head) row: one wrong row drowns in the norm
GEMM_SIZE = 8192


class CudaClock:
    """Times launches with events on the current stream."""

    def time(self, launch: Callable[[], Any], count: int) -> tuple[float, Any]:
        """Milliseconds a launch over `count` launches, and what the last returned.

        One launch more goes first, untimed: while it runs the host queues the others, so that the device never waits.
        """
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        result = launch()
        start.record()
        for _ in range(count):
            result = launch()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / count, result

    def synchronize(self) -> None:
        """Waits for the device; raises what went wrong on it."""
        torch.cuda.synchronize()


class Heater:
    """Matrix products of size^3 in bf16 on random data: they heat the card, and say what cuBLAS reaches on it."""

    def __init__(self, clock: Any, device: str, size: int = GEMM_SIZE) -> None:
        self.clock, self.size = clock, size
        self.a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.c = torch.empty_like(self.a)

    def rate(self, launches: int = 20) -> float:
        """TFLOP/s over `launches` products."""
        milliseconds, _ = self.clock.time(lambda: torch.matmul(self.a, self.b, out=self.c), launches)
        return 2 * self.size**3 / milliseconds / 1e9

    def settle(self, at_least_s: float = 2.0, at_most_s: float = 6.0) -> tuple[float, float]:
        """Runs until the rate settles; (TFLOP/s of the first products, TFLOP/s at the end)."""
        self.rate(1)  # loads the library
        begin, rates = time.monotonic(), [self.rate(5)]
        while time.monotonic() - begin < at_most_s:
            rates.append(self.rate())
            if time.monotonic() - begin >= at_least_s and settled(rates):
                break
        return rates[0], statistics.median(rates[-10:])


def settled(rates: Sequence[float], window: int = 10, tolerance: float = 0.01) -> bool:
    """Whether the last `window` rates have the same mean as the `window` before them, to `tolerance`."""
    if len(rates) < 2 * window:
        return False
    last, before = statistics.fmean(rates[-window:]), statistics.fmean(rates[-2 * window : -window])
    return abs(last - before) <= tolerance * before


@dataclass
class Competitor:
    """One peer in one cell: its launch, what it measured, and what went wrong (empty if nothing did).

    glance_ms: of the short look at many, where there was one.
    """

    peer: Peer
    launch: Callable[[], Sequence[Any]]
    launches: int = 1
    rounds_ms: list[float] = field(default_factory=list)
    glance_ms: float = 0.0
    error: float = 0.0
    row_error: float = 0.0
    failure: str = ""

    def check(self, outputs: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compares the outputs with the expected tensors; sets `failure` when they are not the same attention."""
        norm, row = compare([self.peer.restore(output) for output in outputs], expected)
        self.error, self.row_error = max(self.error, norm), max(self.row_error, row)
        if not (norm <= NORM_TOLERANCE and row <= ROW_TOLERANCE):  # so written, NaN fails
            self.failure = f"wrong result: relative error {norm:.2g}, worst row {row:.2g}"

    def record(self, flops: int) -> dict[str, Any]:
        """What goes into the results: {"failed": reason}, or times in ms, rates in TFLOP/s and errors.

        {"glance_ms"} alone for one that was not worth rounds, and among the others where there was a glance.
        """
        if self.failure:
            return {"failed": self.failure}
        glance = {"glance_ms": self.glance_ms} if self.glance_ms else {}
        if not self.rounds_ms:
            return glance
        median = statistics.median(self.rounds_ms)
        return {
            "tflops": flops / median / 1e9,
            "ms": median,
            "spread": (max(self.rounds_ms) - min(self.rounds_ms)) / median,
            "rounds_ms": self.rounds_ms,
            "launches": self.launches,
            "error": self.error,
            "row_error": self.row_error,
        } | glance


def make_inputs(cell: Cell, device: str, seed: int) -> list[Any]:
    """q, k, v and do of a cell: standard normal, bf16, (batch, seqlen, heads, head_dim)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return [torch.randn(cell.shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]


def launcher(peer: Peer, cell: Cell, inputs: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """The call that is timed: () -> (o,) forward, () -> (dq, dk, dv) backward, in the peer's layout."""
    q, k, v, do = (peer.adapt(tensor) for tensor in inputs)
    attend = peer.bind(cell)
    if cell.direction == "fwd":
        return lambda: (attend(q, k, v),)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with peer.context():
        o = attend(*leaves)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def reference(cell: Cell, inputs: Sequence[Any]) -> list[Any]:
    """(o,) or (dq, dk, dv) of a cell by whatever torch picks itself, in (batch, seqlen, heads, head_dim).

    Of a variant by its definition, in float32.
    """
    if cell.variant:
        return by_definition(cell, inputs)
    q, k, v, do = (tensor.transpose(1, 2).detach() for tensor in inputs)
    backward = cell.direction == "bwd"
    leaves = [tensor.requires_grad_(backward) for tensor in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=cell.causal)
    outputs = torch.autograd.grad(o, leaves, do) if backward else (o,)
    return [output.transpose(1, 2) for output in outputs]


def by_definition(cell: Cell, inputs: Sequence[Any]) -> list[Any]:
    """`reference` of a variant: each head of each sequence by itself, since its scores are a square of floats."""
    device = str(inputs[0].device)
    changed = modification(cell, device)
    sequences = pairwise(accumulate(changed.lengths or (cell.seqlen,), initial=0))
    backward = cell.direction == "bwd"
    outputs = [torch.empty(cell.shape, device=device) for _ in range(3 if backward else 1)]
    for (begin, end), b, h in product(sequences, range(cell.batch), range(cell.heads)):
        place = torch.arange(begin, end, device=device)
        q_idx, kv_idx = place[:, None], place[None, :]
        q, k, v = (tensor[b, begin:end, h].float().requires_grad_(backward) for tensor in inputs[:3])
        score = q @ k.T / cell.head_dim**0.5
        score = changed.score(score, b, h, q_idx, kv_idx) if changed.score else score
        if changed.mask:
            score = score.masked_fill(~changed.mask(b, h, q_idx, kv_idx), float("-inf"))
        if cell.causal:
            score = score.masked_fill(q_idx < kv_idx, float("-inf"))
        o = score.float().softmax(-1) @ v
        results = torch.autograd.grad(o, (q, k, v), inputs[3][b, begin:end, h].float()) if backward else (o,)
        for output, result in zip(outputs, results, strict=True):
            output[b, begin:end, h] = result
    return outputs


def compare(outputs: Sequence[Any], expected: Sequence[Any]) -> tuple[float, float]:
    """The worst relative error of some tensors: by the norm of the whole, and by the norm of a row (last dimension).

    A row counts relative to its own norm or to the root mean square of all rows, whichever is larger.
    """
    norm, row = 0.0, 0.0
    for output, wanted in zip(outputs, expected, strict=True):
        if output.shape != wanted.shape:
            return float("inf"), float("inf")
        difference = (output.float() - wanted.float()).norm(dim=-1)
        size = wanted.float().norm(dim=-1)
        scale = size.square().mean().sqrt()
        worst = (difference / torch.maximum(size, scale)).max().item()
        whole = (difference.norm() / size.norm()).item()
        norm = max(norm, whole) if whole == whole else float("nan")
        row = max(row, worst) if worst == worst else float("nan")
        if norm != norm or row != row:
            return float("nan"), float("nan")
    return norm, row


def attempt(competitor: Competitor, clock: Any, step: Callable[[], None]) -> None:
    """Runs a step of one competitor; what it raises becomes its failure, unless the device itself is lost."""
    try:
        step()
    except Exception as error:  # a peer that fails must not stop the others
        competitor.failure = f"{type(error).__name__}: {first_line(error)}"
        try:
            clock.synchronize()
        except Exception as lost:
            raise ContextLost(competitor.peer.name, lost) from error


class ContextLost(RuntimeError):
    """A peer after which the device answers nothing more in this process. `peer` is its name."""

    def __init__(self, peer: str, error: Exception) -> None:
        super().__init__(f"{peer} broke the CUDA context, nothing more can be timed: {first_line(error)}")
        self.peer = peer


class Harness:
    """Times cells on one card: the clock, the heater and the shuffling, with the number of rounds.

    sustained_s: instead of rounds each competitor runs once, for so many seconds, of which the second half counts.
    """

    def __init__(
        self, clock: Any, heater: Heater, device: str, rounds: int = 7, seed: int = 0, sustained_s: float = 0.0
    ) -> None:
        self.clock, self.heater, self.device = clock, heater, device
        self.rounds, self.seed, self.random = 1 if sustained_s else rounds, seed, random.Random(seed)
        self.sustained_s = sustained_s

    def measure(
        self, cell: Cell, peers: Iterable[Peer], margin: float | None = None, kept: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Times every peer that supports the cell; the cell's entry in the results (see `run.run`).

        With a margin (0.1 is 10 percent) all are glanced at, and only those within it of the fastest, and those whose
        names are kept, go through the rounds.
        """
        inputs = make_inputs(cell, self.device, self.seed)
        expected = reference(cell, inputs)
        results: dict[str, Any] = {}
        entrants: list[Competitor] = []
        for peer in peers:
            reason = peer.supports(cell)
            if reason:
                results[peer.name] = {"skipped": reason}
            else:
                entrants.append(self._prepare(peer, cell, inputs, expected))
        working = [one for one in entrants if not one.failure]
        self._race(working if margin is None else self._glance(working, margin, kept), expected)
        results |= {one.peer.name: one.record(cell.flops) for one in entrants}
        about = {"direction": cell.direction, "head_dim": cell.head_dim, "causal": cell.causal, "seqlen": cell.seqlen}
        about |= {"variant": cell.variant} if cell.variant else {}
        return about | {"batch": cell.batch, "heads": cell.heads, "flops": cell.flops, "results": results}

    def _prepare(self, peer: Peer, cell: Cell, inputs: Sequence[Any], expected: Sequence[Any]) -> Competitor:
        """Compiles, checks and warms one peer, and chooses how many launches make a round."""
        competitor = Competitor(peer, launch=lambda: ())

        def step() -> None:
            competitor.launch = launcher(peer, cell, inputs)
            with peer.context():
                competitor.check(competitor.launch(), expected)
                if not competitor.failure:
                    self.clock.time(competitor.launch, 2)
                    milliseconds, _ = self.clock.time(competitor.launch, 2)
                    competitor.launches = launches_for(milliseconds)

        attempt(competitor, self.clock, step)
        return competitor

    def _glance(self, competitors: list[Competitor], margin: float, kept: Sequence[str]) -> list[Competitor]:
        """One short round; those that are within the margin of the fastest, and those that are kept."""

        def look(one: Competitor) -> None:
            with one.peer.context():
                one.glance_ms, _ = self.clock.time(one.launch, max(1, one.launches // GLANCE))

        if competitors:
            self.heater.rate(100)
        for one in self.random.sample(competitors, len(competitors)):
            attempt(one, self.clock, partial(look, one))
        working = [one for one in competitors if not one.failure]
        limit = (1 + margin) * min((one.glance_ms for one in working), default=0.0)
        return [one for one in working if one.glance_ms <= limit or one.peer.name in kept]

    def _race(self, competitors: list[Competitor], expected: Sequence[Any]) -> None:
        """The rounds: each competitor once a round, in a new order every round; then a second look at its result."""
        last: dict[str, Sequence[Any]] = {}
        if competitors:
            self.heater.rate(100)
        for _ in range(self.rounds):
            for competitor in self.random.sample(competitors, len(competitors)):
                if not competitor.failure:
                    attempt(competitor, self.clock, partial(self._round, competitor, last))
        for competitor in competitors:
            if not competitor.failure:
                competitor.check(last[competitor.peer.name], expected)

    def _round(self, competitor: Competitor, last: dict[str, Sequence[Any]]) -> None:
        with competitor.peer.context():
            if self.sustained_s:
                self._settle(competitor)
            milliseconds, outputs = self.clock.time(competitor.launch, competitor.launches)
        competitor.rounds_ms.append(milliseconds)
        last[competitor.peer.name] = outputs

    def _settle(self, competitor: Competitor) -> None:
        """Half of the time that it is to run, at the end of which the clock is what its power allows; makes as long a
        round of the other half."""
        milliseconds, _ = self.clock.time(competitor.launch, competitor.launches)
        competitor.launches = max(competitor.launches, round(500.0 * self.sustained_s / milliseconds))
        self.clock.time(competitor.launch, competitor.launches)

    def host_us(self, peers: Iterable[Peer], head_dim: int, causal: bool) -> Iterator[tuple[str, float]]:
        """Microseconds of host time that one forward call takes, without autograd, peer by peer.

        On a small input, so that the queue of the device never fills: calls without synchronising, over their number.
        Peers that fail are left out; their failure stands in the cells.
        """
        cell = Cell("fwd", head_dim, causal, 256)
        shape = (1, 256, max(1, CHANNELS // head_dim), head_dim)
        tensors = [torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(3)]
        for peer in peers:
            times: list[float] = []
            if not peer.supports(cell):
                step = partial(self._host, peer, cell, tensors, times)
                attempt(Competitor(peer, launch=lambda: ()), self.clock, step)
            if times:
                yield peer.name, statistics.median(times)

    def _host(self, peer: Peer, cell: Cell, tensors: Sequence[Any], times: list[float], calls: int = 100) -> None:
        attend, (q, k, v) = peer.bind(cell), (peer.adapt(tensor) for tensor in tensors)
        with peer.context():
            for batch in range(6):  # the first warms
                self.clock.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    attend(q, k, v)
                elapsed = time.perf_counter() - begin
                if batch:
                    times.append(elapsed / calls * 1e6)
        self.clock.synchronize()


def launches_for(milliseconds: float) -> int:
    """How many launches of that length fill a round."""
    return max(1, min(MAX_LAUNCHES, -int(-ROUND_MS // max(milliseconds, 1e-6))))


def environment() -> dict[str, Any]:
    """The card and the software: names and versions, memory in GiB."""
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_gib": round(card.total_memory / 2**30, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def driver_version() -> str:
    """The version of the NVIDIA driver, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.strip().splitlines()[0] if answer.strip() else "unknown"
