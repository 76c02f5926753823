"""Chip records: consistent, found by name and by capability, and refused where unknown."""

import pytest
from verdicts import PORTABLE, SMALLEST, named

from flashgen.plan.arch import KIB, for_capability, parse_arch, with_shared_memory


@pytest.mark.parametrize("arch", PORTABLE, **named)
def test_records_are_consistent(arch):
    own = for_capability(*arch.capability)
    assert parse_arch(arch.name) is arch and (own is arch or own.portable == arch.name)
    assert arch.shared_per_block == arch.shared_per_multiprocessor - KIB
    assert arch.title and arch.target == arch.name


def test_unknown_chips_are_refused():
    assert for_capability(8, 9).name == "sm_89" and for_capability(12, 1).name == "sm_120"
    assert for_capability(8, 8).name == "sm_87"
    with pytest.raises(ValueError, match=r"arch = 'sm_75' is not known; use one of sm_80, .*sm_120"):
        parse_arch("sm_75")
    with pytest.raises(ValueError, match=r"compute capability 7\.5 is not supported"):
        for_capability(7, 5)
    with pytest.raises(ValueError, match="sram = 0 must be a positive number of bytes"):
        with_shared_memory(SMALLEST, 0)
