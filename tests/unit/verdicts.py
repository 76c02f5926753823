"""The chips that the planner is asked about, and its verdicts on their candidates."""

from flashgen.plan import planner
from flashgen.plan.arch import ARCHES, Arch, parse_arch

SMALLEST = parse_arch("sm_86")
PORTABLE = [arch for arch in ARCHES.values() if arch.family == "sm80"]
named = {"ids": lambda value: str(value.name) if isinstance(value, Arch) else str(value)}


def judged(kernel, spec, arch):
    """Verdicts of the candidates, one after another."""
    sizes = planner.head_dims(spec, arch)
    return (planner.judge(kernel, arch, sizes, candidate) for candidate in planner.candidates(kernel, arch, sizes))
