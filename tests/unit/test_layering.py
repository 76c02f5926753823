"""Imports run one way. The table is the architecture; the checker below it only reads syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A unit (a module or package directly under flashgen/) may import itself and the units of earlier rows.
LAYERS = [
    {"debug"},
    {"ir"},
    {"spec"},
    {"trace", "calculus"},
    {"masks", "scores"},
    {"variants"},
    {"attention"},
    {"plan"},
    {"machine"},
    {"lower"},
    {"emit", "interp"},
    {"build"},
    {"runtime"},
    {"runner", "catalog"},
    {"checks"},
    {"kernel"},
    {"varlen", "blocks"},
    {"api"},
    {"__init__"},
    {"integrations", "bench"},
    {"cli"},
    {"__main__"},
]
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}

# Who may import what others should not know of. In kernel only inside a function: test_import_is_light holds that.
FOREIGN = {
    "cupy": {"runtime"},
    "jinja2": {"emit"},
    "torch": {"integrations", "bench", "kernel"},
}

FAMILIES = ("sm80", "sm90")  # the modules of one chip family never import those of another
READS_ENVIRONMENT = {"flashgen.debug", "flashgen.runtime.cache"}


def unit_of(name):
    """flashgen.ir.nodes -> ir; a name that the root package exports -> __init__."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"


def imported(tree, package):
    """The absolute dotted names that a module of `package` imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            yield from ((".".join([*base, *filter(None, [node.module]), a.name]), node.lineno) for a in node.names)


def reads_environment(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        else:
            continue
        if {"environ", "getenv"} & set(names):
            yield node.lineno


def family(name):
    return next((f for f in FAMILIES if f in name), None)


def violations(module, source, is_package=False):
    """One sentence for each import of `source` that the table forbids. `module` is its dotted name."""
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]
    unit = "__init__" if module == "flashgen" else module.split(".")[1]
    if unit not in RANK:
        return [f"{module}: has no row in LAYERS"]
    found = []
    for name, line in imported(tree, package):
        where, top = f"{module}:{line}", name.split(".")[0]
        if top == "flashgen":
            other = unit_of(name)
            if other != unit and RANK[other] >= RANK[unit]:
                found.append(f"{where}: {unit} must not import {other} ({name})")
            if family(module) and family(name) and family(module) != family(name):
                found.append(f"{where}: {family(module)} must not import {family(name)} ({name})")
        elif unit not in FOREIGN.get(top, {unit}):
            found.append(f"{where}: {top} belongs in {', '.join(sorted(FOREIGN[top]))}")
    if module not in READS_ENVIRONMENT:
        found += [
            f"{module}:{line}: only debug and runtime.cache read the environment" for line in reads_environment(tree)
        ]
    return found


def test_imports_run_one_way():
    found = []
    for path in sorted((ROOT / "flashgen").rglob("*.py")):
        is_package = path.name == "__init__.py"
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, path.read_text(encoding="utf-8"), is_package)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("flashgen.ir.nodes", "from flashgen.plan import arch", "ir must not import plan"),
        ("flashgen.ir.nodes", "from ..lower.sm80 import x", "ir must not import lower"),
        ("flashgen.ir.nodes", "def f():\n    import flashgen.api", "ir must not import api"),
        ("flashgen.runtime.launch", "from flashgen import attention_kernel", "runtime must not import __init__"),
        ("flashgen.emit.cuda", "from ..interp import tile", "emit must not import interp"),
        ("flashgen.lower.sm90", "from . import sm80", "sm90 must not import sm80"),
        ("flashgen.lower.sm80", "from ..machine.sm90 import Wgmma", "sm80 must not import sm90"),
        ("flashgen.plan.planner", "import cupy.cuda", "cupy belongs in"),
        ("flashgen.lower.masks", "from jinja2 import Template", "jinja2 belongs in"),
        ("flashgen.interp.tile", "import torch", "torch belongs in"),
        ("flashgen.plan.planner", "import os\nos.environ['X']", "read the environment"),
        ("flashgen.runtime.compile", "from os import getenv", "read the environment"),
        ("flashgen.helpers", "", "has no row"),
    ],
)
def test_a_planted_violation_is_reported(module, source, complaint):
    assert [complaint in sentence for sentence in violations(module, source)] == [True]


def test_the_allowed_direction_passes():
    assert not violations("flashgen.lower.sm80", "from ..machine import sm80\nfrom . import masks\nimport numpy")
    assert not violations("flashgen.lower", "from . import sm80, sm90", is_package=True)
    assert not violations("flashgen.runtime.cache", "import os\nos.environ.get('FLASHGEN_CACHE_DIR')")


IMPORT = """
import sys, time
start = time.perf_counter()
import flashgen
print(time.perf_counter() - start, *({"cupy", "torch", "networkx"} & set(sys.modules)))
"""


def test_import_is_light():
    best = float("inf")
    for _ in range(3):  # the best of three: another test may hold the core
        run = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, *heavy = run.stdout.split()
        assert not heavy, f"import flashgen also imports {heavy}"
        best = min(best, float(seconds))
        if best < 0.3:
            return
    pytest.fail(f"import flashgen takes {best:.2f} s")


def test_the_function_keeps_its_name_when_its_package_is_imported():
    """flashgen.attention is a function, and the package of the loop nests, which is imported at the first use."""
    code = "import flashgen; flashgen.compile(16).ir; assert callable(flashgen.attention), flashgen.attention"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
