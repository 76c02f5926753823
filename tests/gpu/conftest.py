"""A GPU test names the kernel it needs as its parameter `spec`; all that are named are compiled side by side first."""

import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = "import json, sys, flashgen; flashgen.compile(**json.loads(sys.argv[1])).report"


def compile_to_disk(options):
    """Compiles every kernel of one spec in a process of its own, for the disk cache; returns what went wrong."""
    command = [sys.executable, "-c", COMPILE, json.dumps(options)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return None if run.returncode == 0 else f"{options}: {run.stderr.strip()[-400:]}"


@pytest.fixture(scope="session")
def compiled(request):
    """Fills the disk cache. A spec that fails here fails again, with its own message, in the test that needs it."""
    from flashgen.kernel import current_arch

    arch = current_arch().name
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    specs = {p["spec"]: None for p in parameters if "spec" in p}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for problem in pool.map(compile_to_disk, [spec.options() | {"arch": spec.arch or arch} for spec in specs]):
            if problem:
                warnings.warn(problem, stacklevel=1)


@pytest.fixture
def kernel(spec, compiled):
    import flashgen

    return flashgen.compile(**spec.options())
