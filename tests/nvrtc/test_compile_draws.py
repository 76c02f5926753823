"""Drawn functions that NVRTC once made branches of, around which it serializes the products: an error on sm_90a."""

import pytest

pytest.importorskip("torch")
import draws


@pytest.mark.parametrize("number", [70, 134, 144])
def test_a_score_of_minus_infinity_is_no_branch(number):
    report = draws.numbered(number).compile(arch="sm_90a").report
    assert report["attention_forward"].registers > 0
