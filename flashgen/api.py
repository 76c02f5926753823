"""Arrays in, arrays out: `compile` and `attention`, which check what is asked for and choose the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen import debug, variants
from flashgen.ir.dtype import F32
from flashgen.kernel import Aux, Kernel, current_arch, kernel_for, traced_by_torch, untraced
from flashgen.plan.arch import parse_arch
from flashgen.runtime import sequences
from flashgen.runtime.arguments import check_dimensions
from flashgen.runtime.arrays import is_array, library_of
from flashgen.runtime.dropping import parse
from flashgen.spec import Spec, parse_dtype
from flashgen.trace.state import state
from flashgen.varlen import VarlenKernel

if TYPE_CHECKING:
    from flashgen.runtime.blocks import BlockMask
    from flashgen.trace import DTypes

KEPT = 1024  # kernels of calls; functions that are others in each step of a training fill them
LAYOUTS = ("bshd", "bhsd")
TARGETS = ("auto", "cuda", "interpret")


def compile(
    head_dim: int = 128,
    causal: bool | str = True,
    *,
    head_dim_v: int | None = None,
    dtype: Any = "bfloat16",
    layout: str = "bshd",
    arch: str | None = None,
    target: str = "auto",
    deterministic: bool = False,
    window: variants.Window | None = None,
    softcap: float | None = None,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    bias: bool = False,
    alibi: bool = False,
    varlen: bool = False,
    sinks: bool = False,
    dropout: bool = False,
    shared_kv: bool = False,
    precision: str | None = None,
) -> Kernel:
    """A kernel for one kind of attention; sizes of batch, heads and sequences stay free.

    head_dim, head_dim_v: multiples of 8 from 8 to 576 and to 512; head_dim_v is head_dim where None. Where one is over
        256 there is a forward alone, and a call with inputs that require gradients is refused.
    causal: bottom-right aligned, query i sees keys up to i + seqlen_k - seqlen_q; "top-left": up to i.
    dtype: "bfloat16", "float16", "float32", or the torch or NumPy dtype; "float64" on the interpreter alone.
    layout: "bshd" (batch, seqlen, heads, head_dim) or "bhsd".
    arch: "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a" (Hopper's own instructions) or "sm_120"; None is the
        current GPU's own, or sm_80 without a GPU.
    target: "cuda", "interpret" (the CPU interpreter), or "auto": by where the arrays are.
    deterministic: the backward repeats bit for bit, at the price of computing the scores twice; and once more for the
        gradient of an array that score_mod does not index by b, h, q_idx, kv_idx and constants alone.
    window: (left, right), the keys that a query sees on both sides of the last one that `causal` would show it; None is
        any number.
    softcap: scores become softcap * tanh(score / softcap), before score_mod.
    mask_mod: a function of (b, h, q_idx, kv_idx), true where the query sees the key, which all masks must show it.
    score_mod: a function of (score, b, h, q_idx, kv_idx): what takes the place of the scaled score. Both are plain
        Python that is traced, with flashgen.where, exp, tanh and so on; the backward is derived. Further arguments of
        either are arrays, which a call brings: kernel(q, k, v, mask_aux=(...), score_aux=(...)). Until then their
        types are assumed; for others the kernel makes another of itself.
    bias: a number from an array is added to each score: kernel(q, k, v, bias=...).
    alibi: slope * |q_idx + seqlen_k - seqlen_q - kv_idx| is taken from each score: kernel(q, k, v, alibi_slopes=...).
        Both come last. Arrays that the scores read get gradients: with torch, or of `Kernel.backward` with aux_grads.
    varlen: sequences of different lengths are packed one behind the other, and the kernel, a VarlenKernel, is called as
        `varlen_attention` is.
    sinks: each head has a logit that takes part in the denominators of its softmax alone, which a call brings:
        kernel(q, k, v, sinks=t), t of shape (heads,), float32 or `dtype`. P = exp(s) / (sum exp(s) + exp(t)), the LSE
        counts t in, and t has a gradient. A query that sees no key has o = 0 and lse = t.
    dropout: each call drops a part of the probabilities, O = (keep * P / (1 - p)) V, and says which:
        kernel(q, k, v, dropout_p=p, dropout_seed=seed, dropout_offset=0). The LSE is that without dropout.
    shared_kv: values are the first head_dim_v columns of the keys, as in MLA (head_dim=576, head_dim_v=512). They are
        loaded once, and the kernel is called without them: kernel(q, k). A forward alone.
    precision: of products of float32. "3xtf32" (None): three of TF32 for each, as good as float32; "tf32": one, which
        rounds the operands to 10 bits, at a third of the time. On sm_90a float32 takes the kernels of sm_90.

    Nothing is compiled by NVRTC before the first launch, or before `report` is read.
    Raises ValueError or TypeError for arguments that are not supported.
    """
    _check_choices(deterministic, layout, target, varlen)
    if not isinstance(dropout, bool):
        raise TypeError(f"dropout = {dropout!r:.40} must be True or False; the call says how much, dropout_p=p")
    if not isinstance(sinks, bool):
        raise TypeError(f"sinks = {sinks!r:.40} must be True or False; the call brings the array, kernel(..., sinks=t)")
    if not isinstance(shared_kv, bool):
        raise TypeError(f"shared_kv = {shared_kv!r:.40} must be True or False; the call brings the array, kernel(q, k)")
    for name, flag in (("bias", bias), ("alibi", alibi)):
        if flag is True and varlen:
            raise ValueError(f"{name} = True with varlen is not supported; give a score_mod that reads the array")
    if debug.interpret():
        target = "interpret"
    width = head_dim if head_dim_v is None else head_dim_v

    def traced(mask_dtypes: DTypes | None, score_dtypes: DTypes | None) -> Spec:
        options = (window, softcap, mask_mod, score_mod, mask_dtypes, score_dtypes, bias, alibi)
        bottom_right, mask, score = variants.functions(causal, *options)
        same = (head_dim, width, parse_dtype(dtype, precision), bottom_right, deterministic)
        more: dict[str, Any] = {"sinks": F32 if sinks else None, "dropout": dropout, "shared_kv": shared_kv}
        return Spec(*same, mask=mask, score=score, varlen=varlen, **more)

    spec = traced(None, None)
    layout, kind = (sequences.LAYOUT, VarlenKernel) if varlen else (layout, Kernel)
    surroundings = (current_arch() if arch is None else parse_arch(arch), layout, target, arch is not None)
    return kind(spec, *surroundings, traced) if spec.arrays else kernel_for(spec, *surroundings, kind)


def _check_choices(deterministic: bool, layout: str, target: str, varlen: bool) -> None:
    for name, flag in (("deterministic", deterministic), ("varlen", varlen)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} = {flag!r} must be True or False")
    if varlen and layout != "bshd":
        raise ValueError(f"layout = {layout!r} with varlen, whose arrays are (total, heads, head_dim); leave it out")
    _check_layout(layout)
    if not isinstance(target, str) or target not in TARGETS:
        raise ValueError(f"target = {target!r} is not known; use 'auto', 'cuda' or 'interpret'")


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r} is not known; use 'bshd' or 'bhsd'")


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    *,
    window: variants.Window | None = None,
    softcap: float | None = None,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    mask_aux: Aux = None,
    score_aux: Aux = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    block_mask: BlockMask | None = None,
    seqused_k: Any = None,
    check: bool = False,
    precision: str | None = None,
) -> Any:
    """softmax(scale * q k^T) v, exactly, in O(seqlen) memory; compiled at first use, differentiable with torch.

    q: (batch, seqlen_q, heads, head_dim) for layout "bshd"; k: (batch, seqlen_k, heads_kv, head_dim);
    v: (batch, seqlen_k, heads_kv, head_dim_v), heads a multiple of heads_kv. bfloat16, float16 or float32, on the CPU
    float64 too; torch (CUDA or CPU), CuPy or NumPy. causal: bottom-right aligned, or "top-left".
    scale: 1/sqrt(head_dim) where None.
    window, softcap, mask_mod, score_mod and precision as `compile` takes them; mask_aux, score_aux, bias, alibi_slopes,
    sinks, dropout, block_mask, seqused_k and check as a kernel does.
    What functions refer to (variables, defaults, numbers in modules, other functions) is looked at in each call, and
    they are traced again where it has changed, and in each call where they refer to lists, objects or classes.
    Returns o (batch, seqlen_q, heads, head_dim_v), with return_lse also the natural-log LSE, float32
    (batch, heads, seqlen_q), of float64 float64. Raises ValueError or TypeError before anything is compiled.
    """
    options: dict[str, Any] = {"window": window, "softcap": softcap, "mask_mod": mask_mod, "score_mod": score_mod}
    options["precision"] = precision
    arrays: dict[str, Any] = {"mask_aux": mask_aux, "score_aux": score_aux, "bias": bias, "alibi_slopes": alibi_slopes}
    arrays |= {"sinks": sinks, "block_mask": block_mask, "seqused_k": seqused_k}
    drops = parse(dropout_p, dropout_seed, dropout_offset) is not None
    if drops:
        arrays |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
    if traced_by_torch():
        given = (q, k, v, causal, scale, layout, return_lse)
        return untraced(attention)(*given, **options, **arrays, check=check)
    library_of(q)
    library_of(v, "v")
    check_dimensions("q", q)
    check_dimensions("v", v)
    options |= {"causal": causal, "layout": layout, "dropout": drops, "sinks": sinks is not None}
    options |= {"bias": bias is not None, "alibi": alibi_slopes is not None}
    kernel = _kernel_of((q.shape[3], v.shape[3]), q.dtype, options, arrays)
    return kernel(q, k, v, scale=scale, return_lse=return_lse, check=check, **arrays)


_kept: dict[tuple, Kernel] = {}


def _kernel_of(dims: tuple[int, int], dtype: Any, options: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """The kernel that runs a call of these options and arrays: the one of an earlier call, where all is as it was then.

    Functions that may give another trace than they did, or of which that cannot be told, are traced.
    """
    key = _key(dims, dtype, options, arrays)
    kernel = None if key is None else _kept.get(key)
    if kernel is None:
        assumed = compile(dims[0], head_dim_v=dims[1], dtype=str(dtype).removeprefix("torch."), **options)
        kernel = assumed.resolve(**arrays)[0]  # of these types: it needs no function any more, and holds none
        if key is not None and key == _key(dims, dtype, options, arrays):  # nothing has changed during the trace
            if len(_kept) >= KEPT:
                _kept.clear()
            kernel = _kept.setdefault(key, kernel)
    return kernel


def _key(dims: tuple[int, int], dtype: Any, options: dict[str, Any], arrays: dict[str, Any]) -> tuple | None:
    """All that the kernel of a call depends on, None where that cannot be told; it holds no array and no function."""
    known = state(tuple(options.values()))
    if known is None:
        return None
    types = [None if array is None else _types(array) for array in arrays.values()]
    return dims, dtype, known, current_arch().name, debug.interpret(), *types


def _types(array: Any) -> Any:
    """What of an array, or of several, a kernel depends on; what is no array has a class, and the kernel refuses it."""
    if type(array) is tuple or type(array) is list:
        return tuple([_types(item) for item in array])
    return array.dtype if is_array(array) else type(array)


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    seqused_k: Any = None,
    window: variants.Window | None = None,
    softcap: float | None = None,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    mask_aux: Aux = None,
    score_aux: Aux = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    block_mask: None = None,
    check: bool = False,
    precision: str | None = None,
) -> Any:
    """`attention` of each of many sequences, packed one behind the other; differentiable with torch.

    q: (total_q, heads, head_dim), k: (total_k, heads_kv, head_dim), v: (total_k, heads_kv, head_dim_v).
    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,) on the device of q, from 0 up to the total and never falling:
    sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1], which may be none. To mask and score functions b is the
    number of the sequence, and q_idx, kv_idx, seqlen_q and seqlen_k are its own; causal is aligned within each.
    max_seqlen_q, max_seqlen_k: hints, and only that. Where max_seqlen_q is short, query heads that share a key head
    share tiles. Nothing waits for the device.
    seqused_k: int32 (batch,), how many of the keys of each sequence are used, its length at most: the others are not
    read, and have zero gradients.
    sinks, dropout_p, dropout_seed, dropout_offset: as `attention` takes them. What is dropped of sequence b is what is
    dropped of batch b of a call with sequences of one length: element (h, i, j) of a sequence, counted within it, is
    kept where `flashgen.dropout_mask(seed, offset, p, batch, heads, longest_q, longest_k)[b, h, i, j]`, which is the
    same whatever the other lengths are.
    block_mask: None; lists of blocks are of sequences of one length.
    check: look at the values of cu_seqlens and seqused_k, for which this waits for the device; on the CPU they always
    are. Unchecked, wrong ones are read and written by.
    Returns o (total_q, heads, head_dim_v), with return_lse also the natural-log LSE, float32 (heads, total_q).
    Raises ValueError or TypeError before anything is compiled.
    """
    options: dict[str, Any] = {"window": window, "softcap": softcap, "mask_mod": mask_mod, "score_mod": score_mod}
    options["precision"] = precision
    arrays: dict[str, Any] = {"mask_aux": mask_aux, "score_aux": score_aux, "seqused_k": seqused_k, "sinks": sinks}
    drop: dict[str, Any] = {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if traced_by_torch():
        more = {"block_mask": block_mask, "check": check}
        return untraced(varlen_attention)(*given, causal, scale, return_lse, **options, **arrays, **drop, **more)
    drops = parse(dropout_p, dropout_seed, dropout_offset) is not None
    library_of(q)
    library_of(v, "v")
    sequences.check_dimensions("q", q)
    sequences.check_dimensions("v", v)
    options |= {"causal": causal, "varlen": True, "sinks": sinks is not None, "dropout": drops}
    arrays |= drop if drops else {}
    kernel = _kernel_of((q.shape[2], v.shape[2]), q.dtype, options, arrays)
    return kernel(*given, scale=scale, return_lse=return_lse, block_mask=block_mask, check=check, **arrays)
