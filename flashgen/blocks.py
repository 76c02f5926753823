"""`block_mask`: which blocks of the scores a mask skips, found once for the calls that have the same mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen import debug, variants
from flashgen.kernel import Aux, traced_by_torch, untraced
from flashgen.plan.arch import for_capability, parse_arch
from flashgen.runner import program_of
from flashgen.runtime import auxiliary, launch
from flashgen.runtime.arguments import MAX_SIZE, gapless, shown
from flashgen.runtime.arrays import Library, library_of
from flashgen.spec import Spec, parse_integer

if TYPE_CHECKING:  # with the compiler, which is imported when there is something to compile
    from flashgen.runtime.blocks import BlockMask

BLOCK_SIZES = (16, 32, 64, 128)
MAX_QUERIES = 1 << 24  # blocks of queries are counted up to 2^20 (attention/lists.py), and no tile has fewer than 16


def block_mask(
    mask_mod: Callable | None,
    aux: Aux,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool | str = False,
    window: variants.Window | None = None,
    block_size: int = 64,
    like: Any = None,
) -> BlockMask:
    """Which blocks a mask skips, shows in full or in part: `kernel(q, k, v, mask_aux=aux, block_mask=blocks)`.

    mask_mod, causal, window: those of the kernel, of which all that hide something are evaluated; a kernel with others
    refuses the result. aux: the arrays that mask_mod reads, as mask_aux, or None.
    batch, heads: 1 where the mask is the same for all batches, or all (query) heads, of a call. seqlen_q, seqlen_k: the
    lengths of the calls. block_size: rows and columns of a block, 16, 32, 64 or 128; kernels with other tiles visit
    those that cover a visible block.
    like: an array in the library and on the device of q, where aux has none.

    It is made on the device of the arrays, once, by evaluating the mask for every element, in O(blocks) memory: 4 bytes
    for a block, and 4 for each entry of the lists that kernels make of it, which it keeps. It serves forward and
    backward, all head dims and tiles. It is not made anew when the arrays change: make another then, or kernels go
    where the old mask showed something.
    Raises ValueError or TypeError, before anything is compiled, for what a kernel would refuse too.
    """
    if traced_by_torch():
        options = {"causal": causal, "window": window, "block_size": block_size, "like": like}
        return untraced(block_mask)(mask_mod, aux, batch, heads, seqlen_q, seqlen_k, **options)
    from flashgen.runtime.blocks import BlockMask

    dtypes = auxiliary.dtypes_of("aux", aux)
    bottom_right, mask, _ = variants.functions(causal, window, None, mask_mod, None, dtypes)
    spec = Spec(causal=bottom_right, mask=mask)
    given = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes = {name: parse_integer(name, size, "use a whole number") for name, size in given.items()}
    _check(spec, sizes, block_size)
    arrays = auxiliary.named(spec, aux, None)
    first = next(iter(arrays.values()), like)
    if first is None:
        raise ValueError("aux has no array to say where the blocks are to lie; give like=q")
    library = library_of(first, "like" if first is like else "aux[0]")
    for name, array in arrays.items():
        if library_of(array, name) is not library:
            raise TypeError(
                f"{shown(name)} is not of {library.name} as the first is; convert all arrays to one library"
            )
    auxiliary.check_arrays(spec, library, library.device(first), arrays, 0 not in sizes.values())
    rows, columns = (-(-sizes[name] // block_size) for name in ("seqlen_q", "seqlen_k"))
    visible = library.empty((sizes["batch"], sizes["heads"], rows, columns), first, float32=True)
    _count(spec, library, arrays, visible, sizes | {"kv_blocks": columns}, block_size)
    return BlockMask(spec, library, visible, tuple(sizes.values()), block_size)  # type: ignore[arg-type]


def _check(spec: Spec, sizes: dict[str, int], block_size: Any) -> None:
    """Refuses sizes that no call may have, and those that one number for all would be wrong for."""
    if isinstance(block_size, bool) or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size = {block_size!r} must be one of {', '.join(map(str, BLOCK_SIZES))}")
    for name, size in sizes.items():
        least, most = (1 if name == "heads" else 0), launch.MAX_BLOCKS if name in ("batch", "heads") else MAX_SIZE
        if not least <= size <= most:
            raise ValueError(f"{name} = {size} must be from {least} to {most}; split the call")
    if sizes["seqlen_q"] > MAX_QUERIES:
        raise ValueError(f"seqlen_q = {sizes['seqlen_q']} exceeds the {MAX_QUERIES} of a list; split the call")


def _count(spec: Spec, library: Library, arrays: dict, visible: Any, sizes: dict[str, int], block_size: int) -> None:
    """Fill `visible`."""
    from flashgen import build
    from flashgen.runtime import interpret

    device = library.device(visible)
    if 0 in visible.shape:
        return
    if device is None or debug.interpret():
        stages = build.block_counts(spec, parse_arch("sm_80"), block_size)
        interpret.block_counts(stages, library, arrays, visible, sizes)
        return
    arch = for_capability(*launch.compute_capability(device))
    program = program_of(build.block_counts(spec, arch, block_size))
    batches, heads, rows, columns = visible.shape
    strides = {"visible": gapless((batches, heads * rows, columns))[:-1]} | auxiliary.layouts(arrays, library, arrays)
    given = {"visible": visible} | arrays
    pointers = library.pointers([given[name] for name in program.tensors])
    program.bind(strides, sizes | {"batches": batches, "group": 1}).launch(pointers, library.stream(device), device)
