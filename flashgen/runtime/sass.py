"""A cubin as SASS, for FLASHGEN_DEBUG=5 and FLASHGEN_DUMP: by CUDA's disassembler, where one is on the PATH."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

from flashgen import debug

TOOLS = {"nvdisasm": ("--print-code",), "cuobjdump": ("--dump-sass",)}  # the first that is found

log = logging.getLogger("flashgen")


def show(name: str, image: bytes) -> None:
    """Show a kernel's SASS at debug level 5 and in a dump; where that cannot be, a log line says why."""
    tool = next(filter(None, map(shutil.which, TOOLS)), None)
    if tool is None:
        log.info("the SASS of %s is not shown: put %s of a CUDA toolkit on the PATH", name, " or ".join(TOOLS))
        return
    try:
        debug.show(5, "sass", name, disassemble(tool, image))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the SASS of %s is not shown: %s; is it as new as NVRTC?", name, error)


def disassemble(tool: str, image: bytes) -> str:
    """What a disassembler prints for a cubin. Raises OSError or SubprocessError where it does not run or fails."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(image + b"\0")  # CuPy cuts the last byte of a cubin
        command = [tool, *TOOLS[Path(tool).stem], str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
