"""hypothesis over specs and small shapes, through the public functions, on the interpreter."""

import pytest

pytest.importorskip("hypothesis")
torch = pytest.importorskip("torch")

import support  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import flashgen  # noqa: E402

# The same examples in every run: a failure in CI is one that a person can repeat.
EXAMPLES = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
HEAD_DIMS = st.integers(1, 32).map(lambda n: 8 * n)
SMALL_HEAD_DIMS = st.sampled_from([8, 16, 24, 32, 40, 64])
LENGTHS = st.one_of(st.integers(0, 20), st.integers(0, 150))


@st.composite
def problems(draw):
    """(options of compile, arrays q k v do with odd strides now and then, scale, with_dlse)."""
    head_dim, head_dim_v = draw(SMALL_HEAD_DIMS), draw(SMALL_HEAD_DIMS)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dims = (draw(st.integers(0, 2)), draw(LENGTHS), draw(LENGTHS), heads_kv * group, heads_kv, head_dim, head_dim_v)
    arrays = support.random_inputs(*dims, dtype=dtype, device="cpu", seed=draw(st.integers(0, 99)))
    arrays = [padded(x) if draw(st.booleans()) else x for x in arrays]
    options = {"causal": draw(st.booleans()), "dtype": dtype, "head_dim_v": head_dim_v}
    options["deterministic"] = draw(st.booleans())
    scale = draw(st.none() | st.floats(1e-3, 1.0))
    return {"head_dim": head_dim} | options, arrays, scale, draw(st.booleans())


def padded(x):
    """x with rows one element further apart, so that hardly any begins at a multiple of 16 bytes."""
    return torch.cat([x, x[..., :1]], dim=-1)[..., :-1]


@EXAMPLES
@given(problems())
def test_attention_follows_the_rule(problem):
    options, (q, k, v, do), scale, with_dlse = problem
    kernel = flashgen.compile(**options, target="interpret")
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1]) if with_dlse else None
    found = support.failures(
        lambda *leaves: kernel(*leaves, scale=scale, return_lse=True),
        *(q, k, v, do),
        causal=options["causal"],
        scale=scale,
        dlse=dlse,
    )
    assert not found, "\n".join(found)


@settings(EXAMPLES, max_examples=15)
@given(
    head_dim=HEAD_DIMS,
    head_dim_v=st.none() | HEAD_DIMS,
    causal=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    deterministic=st.booleans(),
    arch=st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]),
)
def test_every_valid_spec_has_a_plan_and_a_text(arch, **options):
    kernel = flashgen.compile(**options, arch=arch)
    assert set(kernel.source) == set(kernel.machine_ir) and kernel.explain()
    assert flashgen.compile(**options, arch=arch).spec == kernel.spec


@EXAMPLES
@given(head_dim=st.integers(-300, 1000).filter(lambda n: n % 8 or not 8 <= n <= 256))
def test_every_invalid_head_dim_is_refused(head_dim):
    with pytest.raises(ValueError, match="head_dim"):
        flashgen.compile(head_dim)


@EXAMPLES
@given(shift=st.integers(1, 40), rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_causal_attention_of_a_suffix_is_a_suffix(shift, rows, seed):
    """Bottom-right alignment: the last `rows` queries alone, with all keys, give the last rows of the whole."""
    seqlen = rows + shift
    q, k, v, _ = support.random_inputs(1, seqlen, seqlen, 2, 1, 16, dtype=torch.float16, device="cpu", seed=seed)
    whole, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    part, part_lse = flashgen.attention(q[:, shift:], k, v, causal=True, return_lse=True)
    torch.testing.assert_close(part, whole[:, shift:], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(part_lse, lse[..., shift:], atol=5e-5, rtol=1e-5)


@EXAMPLES
@given(cut=st.integers(1, 59), seed=st.integers(0, 99))
def test_parts_merge_through_their_lse(cut, seed):
    """Attention over two halves of the keys, weighted by exp(lse), is attention over all of them."""
    q, k, v, _ = support.random_inputs(2, 9, 60, 2, 2, 16, dtype=torch.float16, device="cpu", seed=seed)
    whole, lse = flashgen.attention(q, k, v, return_lse=True)
    parts = [flashgen.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(cut), slice(cut, None))]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [torch.exp(x - merged_lse).transpose(1, 2)[..., None] for _, x in parts]
    merged = sum(w * o.float() for w, (o, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(merged_lse, lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(merged, whole.float(), atol=4e-3, rtol=0)
