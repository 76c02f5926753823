"""CUDA text to a cubin with NVRTC, and what ptxas says about it. No GPU, no driver and no C++ compiler is needed.

A kernel sees the headers of its `Source` and nothing else of the machine, so the key of the disk cache names
everything that the cubin depends on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from flashgen import debug
from flashgen.runtime import cache

if TYPE_CHECKING:
    from flashgen.emit.source import Source

log = logging.getLogger("flashgen")

_FRAME = r"Function properties for (\S+)\s[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill"
_LOSS = re.compile(r"Performance Loss|serialized|setmaxnreg.*ignored")


# NVRTC has a cache of its own, and a hit in it says nothing of registers and spills.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")


class CompileError(RuntimeError):
    """A kernel that NVRTC or ptxas refuses, or compiles to something slow. `log` is all that the compiler said."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel."""

    registers: int  # a thread
    spill_stores: int  # bytes a thread, with the functions that the kernel calls
    spill_loads: int  # bytes a thread
    static_shared: int  # bytes a block; dynamic shared memory is not in it
    stack: int  # bytes a thread
    seconds: float  # wall time of the compile that made the cubin
    cached: bool  # the cubin came from the disk cache
    nvrtc_version: str
    log: str  # everything that NVRTC and ptxas printed


@dataclasses.dataclass(frozen=True)
class Cubin:
    """One compiled kernel."""

    name: str  # of the extern "C" function
    arch: str  # "sm_80", "sm_90a"
    image: bytes = dataclasses.field(repr=False)  # the ELF file that the driver loads
    report: Report


def nvrtc(source: Source, arch: str, options: Iterable[str] = ()) -> Cubin:
    """Compiles one kernel, or loads it from the disk cache.

    source: the CUDA text, with an extern "C" kernel `source.name`, and the headers it includes.
    arch: the chip, such as "sm_80" or "sm_90a". options: further NVRTC options, such as "-lineinfo".

    Raises ValueError for an arch that is not of that form and for an option that names an arch, ImportError without
    CuPy, and CompileError if the kernel does not compile, or if ptxas serialized wgmma or ignored setmaxnreg.
    """
    options = tuple(options)
    _check(arch, options)
    debug.configure_logging()
    cubin = _load_or_compile(source, arch, options)
    if debug.watching(5):
        from flashgen.runtime import sass  # 10 ms, for what it imports

        sass.show(cubin.name, cubin.image)
    return cubin


def _load_or_compile(source: Source, arch: str, options: tuple[str, ...]) -> Cubin:
    version = cache.installed_nvrtc()
    if version is not None and (hit := _load(source, arch, cache.key(source, arch, options, version))):
        return hit
    version = _loaded_version(version)
    key = cache.key(source, arch, options, version)
    if hit := _load(source, arch, key):
        return hit
    with cache.lock(key):
        return _load(source, arch, key) or _compile_and_store(source, arch, options, version, key)


def compile_many(
    sources_and_archs: Iterable[tuple[Source, str]],
    jobs: int | None = None,
    progress: Callable[[int, int, Cubin], None] | None = None,
    options: Iterable[str] = (),
) -> list[Cubin]:
    """Compiles several kernels in parallel threads (NVRTC releases the GIL); the results are in the order given.

    jobs: threads at once; None means one a core. progress: called in this thread after each kernel, with the number
    done, the number of all and the cubin. Raises what `nvrtc` raises, for the first failure; kernels that were not
    begun are then dropped.
    """
    work = list(sources_and_archs)
    options = tuple(options)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1, thread_name_prefix="flashgen-nvrtc") as pool:
        futures = [pool.submit(nvrtc, source, arch, options) for source, arch in work]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                cubin = future.result()
                if progress is not None:
                    progress(done, len(work), cubin)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def nvrtc_version() -> str:
    """The version of NVRTC, such as "13.5.37", or "13.5" where it is not installed as a wheel. May import CuPy."""
    return cache.installed_nvrtc() or _loaded_version(None)


def resources(log: str, name: str) -> dict[str, int]:
    """What `ptxas -v` says of kernel `name`: registers, spill_stores, spill_loads, static_shared and stack.

    Functions that were not inlined spill on their own account and are added, whichever kernel calls them.
    Raises LookupError if the log has nothing on the kernel.
    """
    entry = re.search(rf"Compiling entry function '{re.escape(name)}' for(.*?)(?=Compiling entry|\Z)", log, re.DOTALL)
    used = re.search(r"Used (\d+) registers(.*)", entry[1]) if entry else None
    if used is None:
        raise LookupError(f"ptxas says nothing about a kernel {name!r}")
    kernels = set(re.findall(r"Compiling entry function '([^']+)'", log))
    frames = [row for row in re.findall(_FRAME, log) if row[0] == name or row[0] not in kernels]
    shared = re.search(r"(\d+) bytes smem", used[2])
    return {
        "registers": int(used[1]),
        "spill_stores": sum(int(row[2]) for row in frames),
        "spill_loads": sum(int(row[3]) for row in frames),
        "static_shared": int(shared[1]) if shared else 0,
        "stack": max((int(row[1]) for row in frames), default=0),
    }


def losses(log: str) -> list[str]:
    """The lines of a ptxas log that say that wgmma was serialized or setmaxnreg ignored: a kernel with a lost pipeline.

    These are C7508 (setmaxnreg ignored), C7510 to C7512 (wgmma serialized) and kin; ptxas prints them as information.
    """
    return [line.strip() for line in log.splitlines() if _LOSS.search(line)]


def _check(arch: str, options: tuple[str, ...]) -> None:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ValueError(f"arch {arch!r} is not of the form sm_80 or sm_90a; name a chip in that form")
    for option in options:
        if "-arch" in option or "gpu-architecture" in option:
            raise ValueError(f"option {option!r} names an arch, and NVRTC takes one; pass it as arch")


def _load(source: Source, arch: str, key: str) -> Cubin | None:
    """The cubin stored under `key`, or None."""
    start = time.perf_counter()
    entry = cache.read(key)
    if entry is None:
        return None
    image, fields = entry
    try:
        cubin = Cubin(source.name, arch, image, Report(**fields | {"cached": True}))
    except TypeError as error:
        log.warning("cache entry %s has another form (%s); the kernel is compiled again", cache.path(key), error)
        return None
    log.info("loaded %s for %s in %.1f ms from %s", source.name, arch, 1e3 * (time.perf_counter() - start), key)
    return cubin


def _compile_and_store(source: Source, arch: str, options: tuple[str, ...], version: str, key: str) -> Cubin:
    start = time.perf_counter()
    image, text = _run_nvrtc(source, arch, options)
    seconds = time.perf_counter() - start
    if lost := losses(text):
        raise CompileError(f"{source.name} for {arch} loses its pipeline: {'; '.join(lost)}", text)
    try:
        report = Report(**resources(text, source.name), seconds=seconds, cached=False, nvrtc_version=version, log=text)
    except LookupError as error:
        raise CompileError(f'{source.name} for {arch}: {error}; declare it extern "C" __global__', text) from None
    file = cache.write(key, image, dataclasses.asdict(report))
    message = "compiled %s for %s in %.2f s: %d registers, %d + %d bytes spilled, key %s, cached as %s"
    spills = (report.spill_stores, report.spill_loads)
    log.info(message, source.name, arch, seconds, report.registers, *spills, key, file)
    return Cubin(source.name, arch, image, report)


def _run_nvrtc(source: Source, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The cubin and everything that the compilers printed."""
    compiler = _import_nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = compiler.createProgram(source.text, f"{source.name}.cu", texts, names)
    try:
        compiler.compileProgram(program, (*OPTIONS, f"-arch={arch}", *options))
        return compiler.getCUBIN(program), _text(compiler.getProgramLog(program))
    except compiler.NVRTCError as error:
        text = _text(compiler.getProgramLog(program))
        reasons = [line.strip() for line in text.splitlines() if re.search(r"\b(error|fatal)\b", line)]
        first = "; ".join(reasons[:3]) or str(error)
        raise CompileError(f"{source.name} for {arch} does not compile: {first}", text) from None
    finally:
        compiler.destroyProgram(program)


def _loaded_version(installed: str | None) -> str:
    """The version of the NVRTC that CuPy loaded: the wheel's if it is that one, since it is the more precise."""
    loaded = "{}.{}".format(*_import_nvrtc().getVersion())
    return installed if installed and installed.startswith(f"{loaded}.") else loaded


def _import_nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise ImportError(f"compiling a kernel needs CuPy ({error}); pip install 'flashgen[cuda]'") from None
    return nvrtc


def _text(log: str) -> str:
    """A log as NVRTC gives it, without the zero byte and the blanks at its end."""
    return log.rstrip("\0 \n")
