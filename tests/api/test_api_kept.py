"""Calls of `attention` that repeat have one kernel; what their functions read is looked at in each call."""

import gc
import threading
import types
import weakref

import numpy as np
import pytest
from test_api_refusals import refused

import flashgen
from flashgen import api, masks, scores, trace
from flashgen.kernel import Kernel

torch = pytest.importorskip("torch")

LIMIT = 2
numbers = types.ModuleType("numbers_of_a_user")


def helper(kv_idx):
    return kv_idx < 2


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setattr(api, "_kept", {})
    numbers.limit = 2


@pytest.fixture
def traces(monkeypatch):
    """One entry for each function that is traced."""
    seen, traced = [], trace._traced
    monkeypatch.setattr(trace, "_traced", lambda function, *rest: seen.append(function) or traced(function, *rest))
    return seen


@pytest.fixture
def kernels(monkeypatch):
    """The kernel of each call."""
    seen, attend = [], Kernel.attend
    monkeypatch.setattr(Kernel, "attend", lambda self, *rest: seen.append(self) or attend(self, *rest))
    return seen


Q = torch.zeros(1, 4, 2, 16, dtype=torch.float16)
V = torch.eye(4, 16, dtype=torch.float16).reshape(1, 4, 1, 16).expand(1, 4, 2, 16)
CU = torch.tensor([0, 1, 4], dtype=torch.int32)
IDS = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
BIAS = torch.zeros(1, 2, 4, 4)


def seen_keys(mask_mod, **options):
    """How many keys the last query sees."""
    o = flashgen.attention(Q, Q, V, mask_mod=mask_mod, **options)
    return int((o[0, -1, 0, :4] > 0).sum())


def packed(**options):
    return flashgen.varlen_attention(Q[0], Q[0], V[0], CU, CU, **options)


def changed_cell():
    limit = 2

    def change():
        nonlocal limit
        limit = 3

    return (lambda b, h, q_idx, kv_idx: kv_idx < limit), change


def changed_default():
    def sees(b, h, q_idx, kv_idx, limit=2):
        return kv_idx < limit

    return sees, lambda: setattr(sees, "__defaults__", (3,))


def changed_keyword_default():
    def sees(b, h, q_idx, kv_idx, *, limit=2):
        return kv_idx < limit

    return sees, lambda: sees.__kwdefaults__.update(limit=3)


def changed_code():
    def sees(b, h, q_idx, kv_idx):
        return kv_idx < 2

    def other(b, h, q_idx, kv_idx):
        return kv_idx < 3

    return sees, lambda: setattr(sees, "__code__", other.__code__)


def changed_global():
    def change():
        global LIMIT
        LIMIT = 3

    return (lambda b, h, q_idx, kv_idx: kv_idx < LIMIT), change


def changed_helper():
    def change():
        global helper

        def helper(kv_idx):
            return kv_idx < 3

    return (lambda b, h, q_idx, kv_idx: helper(kv_idx)), change


def changed_number_of_a_module():
    return (lambda b, h, q_idx, kv_idx: kv_idx < numbers.limit), lambda: setattr(numbers, "limit", 3)


def changed_list():
    limits = [2]
    return (lambda b, h, q_idx, kv_idx: kv_idx < limits[0]), lambda: limits.append(limits.pop() + 1)


def changed_object():
    config = types.SimpleNamespace(limit=2)
    return (lambda b, h, q_idx, kv_idx: kv_idx < config.limit), lambda: setattr(config, "limit", 3)


def changed_by_a_name():
    return (lambda b, h, q_idx, kv_idx: kv_idx < getattr(numbers, "limit")), lambda: setattr(numbers, "limit", 3)  # noqa: B009


def changed_callable():
    class Sees:
        limit = 2

        def __call__(self, b, h, q_idx, kv_idx):
            return kv_idx < self.limit

    return Sees(), lambda: setattr(Sees, "limit", 3)


CHANGES = [changed_cell, changed_default, changed_keyword_default, changed_code, changed_global, changed_helper]
CHANGES += [changed_number_of_a_module, changed_list, changed_object, changed_by_a_name, changed_callable]


@pytest.mark.parametrize("make", CHANGES)
def test_a_change_is_seen(make, monkeypatch):
    monkeypatch.setitem(globals(), "LIMIT", 2)
    monkeypatch.setitem(globals(), "helper", helper)
    sees, change = make()
    assert [seen_keys(sees) for _ in range(2)] == [2, 2]
    change()
    assert [seen_keys(sees) for _ in range(2)] == [3, 3]


def options_of_calls():
    yield {"window": (2, 0)}
    yield {"softcap": 30.0}
    yield {"causal": "top-left"}
    yield {"score_mod": scores.alibi}
    yield {"mask_mod": masks.document, "mask_aux": (IDS,)}
    yield {"score_mod": scores.bias, "score_aux": [BIAS]}
    yield {"bias": BIAS, "alibi_slopes": torch.zeros(2)}
    yield {"sinks": torch.zeros(2), "dropout_p": 0.5, "dropout_seed": 1, "window": (2, 0)}
    yield {"mask_mod": lambda b, h, q_idx, kv_idx: flashgen.where(kv_idx < LIMIT, True, q_idx >= kv_idx)}


@pytest.mark.parametrize("options", list(options_of_calls()), ids=lambda options: "_".join(options))
def test_a_call_that_repeats_is_not_traced_again(options, traces, kernels):
    first = flashgen.attention(Q, Q, V, **options)
    count = len(traces)
    assert count
    assert torch.equal(flashgen.attention(Q, Q, V, **options), first)
    assert len(traces) == count and kernels[0] is kernels[1]


@pytest.mark.parametrize(
    "options", [{"window": (2, 0)}, {"mask_mod": masks.document, "mask_aux": (IDS,)}, {"softcap": 3}]
)
def test_packed_sequences_too(options, traces, kernels):
    first = packed(**options)
    count = len(traces)
    assert count and torch.equal(packed(**options), first)
    assert len(traces) == count and kernels[0] is kernels[1]
    flashgen.attention(Q, Q, V, **options)
    assert kernels[2] is not kernels[0]


def test_functions_made_again_share_a_kernel(traces, kernels):
    def make(limit):
        return lambda b, h, q_idx, kv_idx: kv_idx < limit

    assert [seen_keys(make(limit)) for limit in (2, 3, 2, 3)] == [2, 3, 2, 3]
    assert len(traces) == 2 and kernels[:2] == kernels[2:] and kernels[0] is not kernels[1]
    assert [seen_keys(None, window=(left, 0)) for left in (1, 2, 1)] == [2, 3, 2]


def test_arrays_of_other_types_after_the_first_function_has_changed(traces):
    """What is kept does not refer to the function that it was first made for."""
    cells = [2, 2]

    def make(place):
        limit = cells[place]

        def change():
            nonlocal limit
            limit = 3

        return (lambda b, h, q_idx, kv_idx, ids: (kv_idx < limit) & (ids[b, kv_idx] < 1)), change

    (first, change), (second, _) = make(0), make(1)
    ids = torch.zeros(1, 4, dtype=torch.int32)
    assert seen_keys(first, mask_aux=(ids,)) == seen_keys(second, mask_aux=(ids,)) == 2
    change()
    assert seen_keys(second, mask_aux=(ids.float(),)) == seen_keys(second, mask_aux=(ids,)) == 2
    assert seen_keys(first, mask_aux=(ids.float(),)) == seen_keys(first, mask_aux=(ids,)) == 3


def test_a_change_during_the_trace_is_not_kept():
    """As another thread could make it: the kernel is not kept under the state of before."""
    limit, once = 2, [True]

    def swap():
        nonlocal limit
        limit = 3 if once.pop() else 2

    def sees(b, h, q_idx, kv_idx):
        return kv_idx < limit

    def changing(function, *rest):
        if once:
            swap()
        return traced(function, *rest)

    traced = trace._traced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_traced", changing)
        assert seen_keys(sees) == 3
    limit = 2
    assert seen_keys(sees) == 2


def test_types_of_options_are_told_apart():
    assert seen_keys(None, window=(1, 0)) == 2
    refused(flashgen.attention, Q, Q, V, window=(True, 0), mentions=["window", "True", "integer"])
    refused(flashgen.attention, Q, Q, V, window=(1.0, 0), mentions=["window", "1.0", "integer"])
    assert torch.isfinite(flashgen.attention(Q, Q, V, softcap=1)).all()
    refused(flashgen.attention, Q, Q, V, softcap=True, mentions=["softcap", "bool"])
    flashgen.attention(Q, Q, V, causal=True)
    refused(flashgen.attention, Q, Q, V, causal=1, mentions=["causal = 1"])


def test_lists_and_numbers_of_numpy_are_options_still():
    assert seen_keys(None, window=[1, 0]) == seen_keys(None, window=(np.int64(1), 0)) == 2
    refused(flashgen.attention, Q, Q, V, causal=[], mentions="causal = []")
    refused(flashgen.attention, Q, Q, V, layout=[], mentions="layout = []")
    refused(flashgen.attention, Q, Q, V, window={}, mentions="window = {}")
    refused(flashgen.attention, Q, Q, V, precision=[], mentions="precision = []")
    refused(flashgen.attention, Q, Q, V, mask_mod=[], mentions="mask_mod = []")


def test_errors_are_not_kept():
    def sees(b, h, q_idx, kv_idx):
        return kv_idx < undefined  # noqa: F821

    for _ in range(2):
        with pytest.raises(NameError):
            seen_keys(sees)
    globals()["undefined"] = 2
    try:
        assert seen_keys(sees) == 2
    finally:
        del globals()["undefined"]
    with pytest.raises(NameError):
        seen_keys(sees)


def test_wrong_arrays_are_refused_beside_a_kernel_that_is_kept():
    flashgen.attention(Q, Q, V, mask_mod=masks.document, mask_aux=(IDS,))
    given = {"mask_mod": masks.document}
    refused(flashgen.attention, Q, Q, V, **given, mentions="mask_aux has 0")
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=IDS, mentions="mask_aux is of type Tensor")
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=([1],), mentions="mask_aux[0] is of type list")
    odd = types.SimpleNamespace(dtype=[], shape=(1, 4))
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=(odd,), mentions="mask_aux[0] is of type SimpleNamespace")
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=(IDS.long(),), mentions="mask_aux[0] is int64")
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=(IDS.numpy(),), mentions="is not of torch as q is")
    refused(flashgen.attention, Q, Q, V, **given, mask_aux=(IDS[0],), mentions="has 1 dimensions")
    refused(flashgen.attention, Q, Q, V, mask_aux=(IDS,), mentions="mask_aux has 1")


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
def test_sinks_of_each_type(sinks, kernels):
    for _ in range(2):
        flashgen.attention(Q, Q, V, sinks=sinks)
        flashgen.attention(Q, Q, V)
    assert kernels[0] is kernels[2] is not kernels[1] is kernels[3]
    assert str(sinks.dtype) == f"torch.{kernels[0].spec.sinks}"


def test_no_array_and_no_function_is_held():
    array, own = torch.zeros(3), {"limit": 2}
    exec("def sees(b, h, q_idx, kv_idx, ids): return (kv_idx < limit) & (ids[b, kv_idx] < 1)", own)
    own["array"], sees = array, own["sees"]
    ids = torch.zeros(1, 4, dtype=torch.int32)
    assert seen_keys(sees, mask_aux=(ids,)) == 2 and len(api._kept) == 1
    held = [weakref.ref(item) for item in (array, ids, sees)]
    del array, own, sees, ids
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(api, "KEPT", 4)
    for limit in range(12):
        assert seen_keys(masks.prefix(limit), causal=True) == 4
        assert 0 < len(api._kept) <= 4


def test_functions_without_a_state_are_not_kept(traces):
    limits = [2]
    for _ in range(3):
        assert seen_keys(lambda b, h, q_idx, kv_idx: kv_idx < limits[0]) == 2
    assert len(traces) == 3 and not api._kept


def test_threads_get_the_kernels_of_their_own_functions():
    wrong = []

    def work(seed):
        generator = np.random.default_rng(seed)
        for limit in map(int, generator.integers(1, 5, 60)):
            if seen_keys(lambda b, h, q_idx, kv_idx, limit=limit: kv_idx < limit) != limit:
                wrong.append(limit)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(api._kept) == 4
