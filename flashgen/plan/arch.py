"""Chip records: the numbers that plans are made from, with where they come from.

Shared memory, registers and threads: CUDA C++ Programming Guide, "Compute Capabilities", table of technical
specifications. A block may use 1 KiB less than a multiprocessor holds, which the system keeps for itself.
Matrix rates: the chips' white papers (dense, 16-bit inputs, float32 accumulation), in multiply-adds a clock a
multiprocessor; on sm_90 mma.sync reaches about 0.62 of the wgmma rate (measured with cuBLAS's sm80 kernels).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KIB = 1024


@dataclass(frozen=True)
class Arch:
    """One chip. Shared memory in bytes; `mma` is (m, n, k) of the matrix instruction; rates are per clock.

    portable: the record whose kernels run here where this one's family has none.
    """

    name: str
    family: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    mma: tuple[int, int, int]
    matrix_rate: int
    registers: int = 65536
    max_registers: int = 255
    max_threads: int = 2048
    exp_rate: int = 16
    warps: tuple[int, ...] = (4, 8)
    shared_bandwidth: int = 128
    vector_reductions: bool = False
    portable: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        assert self.shared_per_block <= self.shared_per_multiprocessor, self.name
        assert all(size in (8, 16, 64) for size in self.mma), self.name

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        digits = re.sub(r"\D", "", self.name)
        return int(digits[:-1]), int(digits[-1])

    def shared_for(self, resident: int) -> int:
        """Bytes of shared memory of a block, of which a multiprocessor holds so many; each takes 1 KiB beside."""
        return min(self.shared_per_block, self.shared_per_multiprocessor // resident - KIB)

    @property
    def target(self) -> str:
        """The name that the compiler takes."""
        return self.name


def _sm80(name: str, title: str, multiprocessors: int, shared: int, rate: int, **more) -> Arch:
    return Arch(
        name=name,
        family="sm80",
        title=title,
        multiprocessors=multiprocessors,
        shared_per_block=(shared - 1) * KIB,
        shared_per_multiprocessor=shared * KIB,
        mma=(16, 8, 16),
        matrix_rate=rate,
        **more,
    )


ARCHES = {
    arch.name: arch
    for arch in (
        _sm80("sm_80", "A100", 108, 164, 1024),
        _sm80("sm_86", "A10, RTX 30", 84, 100, 512, max_threads=1536),
        _sm80("sm_87", "Orin", 16, 164, 512, max_threads=1536),
        _sm80("sm_89", "L4, L40, RTX 40", 142, 100, 512, max_threads=1536),
        _sm80("sm_90", "H100, H200", 132, 228, 1270, vector_reductions=True),
        Arch(
            name="sm_90a",
            family="sm90",
            title="H100, H200, with wgmma and TMA",
            multiprocessors=132,
            shared_per_block=227 * KIB,
            shared_per_multiprocessor=228 * KIB,
            mma=(64, 8, 16),
            matrix_rate=2048,
            vector_reductions=True,
            portable="sm_90",
        ),
        _sm80("sm_120", "RTX 50, RTX PRO Blackwell", 170, 100, 512, max_threads=1536, vector_reductions=True),
    )
}

# A made-up chip on which properties run in milliseconds: many blocks, stages and ragged edges on tiny shapes.
TOY = Arch(
    name="toy",
    family="sm80",
    title="made up, for tests; nothing is compiled for it",
    multiprocessors=2,
    shared_per_block=4 * KIB,
    shared_per_multiprocessor=8 * KIB,
    mma=(8, 8, 8),
    matrix_rate=64,
    warps=(1, 2),
)


def parse_arch(name: str) -> Arch:
    """The record of a chip: "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_120" or "toy"."""
    found = {TOY.name: TOY, **ARCHES}.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    raise ValueError(f"arch = {name!r} is not known; use one of {', '.join(ARCHES)}")


def check_real(arch: Arch) -> None:
    """ValueError for the made-up chip."""
    if arch.name == TOY.name:
        raise ValueError(f"arch = 'toy' is made up and has no CUDA; its IR and plan show, or use {', '.join(ARCHES)}")


def for_capability(major: int, minor: int) -> Arch:
    """The record that runs on a compute capability: its own, or the nearest older one of the same major version.

    Of two for one capability that which has the chip's own instructions, and a portable one to fall back to.
    """
    found = [arch for arch in ARCHES.values() if arch.capability[0] == major and arch.capability[1] <= minor]
    if not found:
        raise ValueError(f"compute capability {major}.{minor} is not supported; flashgen needs {', '.join(ARCHES)}")
    return max(found, key=lambda arch: (arch.capability, bool(arch.portable)))


def portable_record(arch: Arch) -> Arch:
    """The record whose kernels run where this one's family has none: the same chip, so with as much shared memory."""
    block, whole = arch.shared_per_block, arch.shared_per_multiprocessor
    return replace(parse_arch(arch.portable), shared_per_block=block, shared_per_multiprocessor=whole)


def with_shared_memory(arch: Arch, shared: int) -> Arch:
    """The same chip with another amount of shared memory a block, in bytes: for `explain --sram`."""
    if shared <= 0:
        raise ValueError(f"sram = {shared} must be a positive number of bytes")
    whole = max(shared + KIB, arch.shared_per_multiprocessor)
    return replace(arch, shared_per_block=shared, shared_per_multiprocessor=whole)
