"""The disk cache of compiled kernels: one file a kernel, found by a hash of everything that went into it.

A file is three parts: a line with the SHA-256 of the rest, a line of JSON (the report), and the cubin. It is written
under a temporary name and renamed, so a reader sees all of it or nothing; a lock for each key makes two processes
that want the same kernel compile it once. Whatever goes wrong with the disk costs a compile and a warning, never a
failure.

The only module beside `debug` that reads the environment: FLASHGEN_CACHE_DIR moves the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import FileLock

    from flashgen.emit.source import Source

FORMAT = 1  # raise it when the layout of an entry, or what goes into a key, changes
LOCK_SECONDS = 120.0  # a compile takes about 2 s; whoever waits this long compiles for itself

log = logging.getLogger("flashgen")
_degraded: set[Path] = set()  # directories that a warning was given for


def directory() -> Path:
    """Where the entries lie: FLASHGEN_CACHE_DIR, or the platform's cache directory for flashgen. It may not exist."""
    if moved := os.environ.get("FLASHGEN_CACHE_DIR"):
        return Path(moved).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("flashgen"))


def path(key: str) -> Path:
    """The file that holds, or would hold, the entry of `key`."""
    return directory() / f"{key}.cubin"


def key(source: Source, arch: str, options: tuple[str, ...], nvrtc_version: str) -> str:
    """The name of an entry: the kernel's name and arch for people, and a hash of every ingredient of the cubin."""
    headers = [list(header) for header in source.headers]
    ingredients = [FORMAT, source.name, source.text, headers, arch, list(options), nvrtc_version]
    digest = hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()
    return f"{source.name[:80]}-{arch}-{digest[:40]}"


def installed_nvrtc() -> str | None:
    """The version of the NVRTC wheel that CuPy loads, such as "13.5.37", without importing anything; None if unknown.

    Reads the names of the installed distributions only: importing CuPy to ask NVRTC itself costs half a second.
    """
    return _nvrtc_in(tuple(sys.path))


@functools.cache
def _nvrtc_in(folders: tuple[str, ...]) -> str | None:
    names = [name for folder in folders for name in _listing(folder) if name.endswith(".dist-info")]
    majors = [match[1] for name in names if (match := re.match(r"cupy_cuda(\d+)x-", name))]
    for name in names:
        match = re.match(r"nvidia_cuda_nvrtc(?:_cu\d+)?-((\d+)\.[\d.]+)\.dist-info", name)
        if match and majors[:1] == [match[2]]:
            return match[1]
    return None


def read(key: str) -> tuple[bytes, dict[str, Any]] | None:
    """The cubin and the report stored under `key`; None if there is no entry, or, with a warning, if it is damaged."""
    file = path(key)
    try:
        entry = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _degrade(file.parent, error)
        return None
    try:
        checksum, body = entry.split(b"\n", 1)
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError("its checksum is wrong")
        report, image = body.split(b"\n", 1)
        return image, json.loads(report)
    except ValueError as error:
        log.warning("cache entry %s is damaged (%s); the kernel is compiled again", file, error)
        return None


def write(key: str, image: bytes, report: dict[str, Any]) -> Path | None:
    """Stores a cubin and its report (JSON values) under `key`; returns the file, or None if the disk refuses."""
    file = path(key)
    body = json.dumps(report).encode() + b"\n" + image
    # Not tempfile: its files are readable by their owner alone, and a cache may be filled by one user for others.
    temporary = file.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(temporary, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _degrade(file.parent, error)
        return None
    return file


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """Holds the lock of `key` between processes and threads; does nothing where the disk has no locks."""
    held = _acquire(path(key).with_suffix(".lock"))
    try:
        yield
    finally:
        if held is not None:
            held.release()


def _acquire(file: Path) -> FileLock | None:
    """The lock on `file`, held; None, with a warning, if the disk refuses or another process keeps it too long."""
    import filelock  # 50 ms, and only needed when there is something to compile

    held = filelock.FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        log.warning("another process held %s for over %.0f s; the kernel is compiled without it", file, LOCK_SECONDS)
        return None
    except (OSError, NotImplementedError) as error:
        _degrade(file.parent, error)
        return None
    return held


def _degrade(folder: Path, error: Exception) -> None:
    """Warns, once a directory, that kernels are not kept on disk."""
    if folder not in _degraded:
        _degraded.add(folder)
        log.warning("kernels are not cached in %s (%s); set FLASHGEN_CACHE_DIR to a writable directory", folder, error)


def _listing(folder: str) -> list[str]:
    """The names in a folder of `sys.path`, in order; empty for what is not a folder (a zip file, the empty string)."""
    try:
        return sorted(os.listdir(folder)) if folder else []
    except OSError:
        return []
