"""Who is timed: flashgen, and what a user could pick instead.

A peer is a small object. The harness hands every peer views of the same (batch, seqlen, heads, head_dim) storage:
`adapt` turns such a tensor into the view that the peer wants (no copy), `restore` turns a result back, and `bind`
gives the function q, k, v -> o for one cell. Only what `bind` returns is timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from flashgen.bench.grid import Cell
from flashgen.bench.variants import VARIANTS, Modification, modification

Attend = Callable[[Any, Any, Any], Any]


class Peer:
    """One implementation of exact attention.

    `name` is the key in tables and files; `default` says whether it is timed when nobody asks for it by name;
    `backward` whether it has gradients; `max_head_dim` the largest head dim that it takes; `variants` which of
    `variants.VARIANTS` it can do.
    """

    name = ""
    title = ""
    default = True
    backward = True
    max_head_dim = 256
    variants: tuple[str, ...] = ()

    def version(self) -> str:
        """The version of the package that holds the kernels."""
        raise NotImplementedError

    def available(self) -> str:
        """Empty if the peer can run here, else the reason in one sentence."""
        raise NotImplementedError

    def supports(self, cell: Cell) -> str:
        """Empty if the peer can compute this cell, else the reason in a few words."""
        if cell.direction == "bwd" and not self.backward:
            return "forward only"
        if cell.head_dim > self.max_head_dim:
            return f"head_dim at most {self.max_head_dim}"
        return f"no {cell.variant}" if cell.variant and cell.variant not in self.variants else ""

    def adapt(self, tensor: Any) -> Any:
        """A view, in the peer's layout, of a (batch, seqlen, heads, head_dim) tensor."""
        return tensor

    def restore(self, tensor: Any) -> Any:
        """A (batch, seqlen, heads, head_dim) view of a tensor in the peer's layout."""
        return tensor

    def context(self) -> AbstractContextManager[Any]:
        """What has to be entered around calls of the bound function; entered outside of the timed part."""
        return nullcontext()

    def bind(self, cell: Cell) -> Attend:
        """The function q, k, v -> o of one cell, in the peer's layout, with scale 1/sqrt(head_dim)."""
        raise NotImplementedError

    def forward(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        """o of (batch, seqlen, heads, head_dim) tensors, in the same layout: one call, with nothing timed."""
        attend = self.bind(Cell("fwd", q.shape[-1], causal, q.shape[1]))
        with self.context():
            return self.restore(attend(self.adapt(q), self.adapt(k), self.adapt(v)))


class Flashgen(Peer):
    """This project, through the call that a user writes."""

    name = "flashgen"
    title = "flashgen"
    variants = tuple(VARIANTS)

    def version(self) -> str:
        return _version("flashgen")

    def available(self) -> str:
        return _importable("cupy") or _importable("flashgen")

    def bind(self, cell: Cell) -> Attend:
        flashgen, changed = importlib.import_module("flashgen"), modification(cell, device())
        options = {"causal": cell.causal} | changed.options | changed.arrays
        if changed.lengths:
            return of_one(partial(flashgen.varlen_attention, **options))
        if "mask_aux" in options:  # as flex attention's, made once for many calls
            sizes = (cell.batch, 1, cell.seqlen, cell.seqlen)
            mask, arrays = options["mask_mod"], options["mask_aux"]
            options["block_mask"] = flashgen.block_mask(mask, arrays, *sizes, causal=cell.causal)
        return partial(flashgen.attention, **options)


class _HeadsFirst(Peer):
    """A peer whose tensors are (batch, heads, seqlen, head_dim): it gets transposed views of the common storage."""

    def adapt(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2)

    def restore(self, tensor: Any) -> Any:
        return tensor.transpose(1, 2)


class Sdpa(_HeadsFirst):
    """One backend of torch.nn.functional.scaled_dot_product_attention, alone."""

    def __init__(self, name: str, title: str, backend: str) -> None:
        self.name, self.title, self.backend = name, title, backend

    def version(self) -> str:
        torch = importlib.import_module("torch")
        if self.backend != "CUDNN_ATTENTION":
            return f"torch {torch.__version__}"
        number = torch.backends.cudnn.version() or 0
        return f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}, torch {torch.__version__}"

    def available(self) -> str:
        missing = _importable("torch")
        if missing:
            return missing
        torch = importlib.import_module("torch")
        if self.backend == "CUDNN_ATTENTION":
            return "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN"
        built = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        return "" if built() else "this torch is built without FlashAttention"

    def context(self) -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def bind(self, cell: Cell) -> Attend:
        from torch.nn.functional import scaled_dot_product_attention as attend

        causal = cell.causal
        return lambda q, k, v: attend(q, k, v, is_causal=causal)


class TorchVarlen(Peer):
    """torch.nn.attention.varlen, for packed sequences; off by default, as those are."""

    name = "varlen"
    title = "torch varlen"
    default = False
    variants = ("packed",)

    def version(self) -> str:
        return f"torch {_version('torch')}"

    def available(self) -> str:
        return _importable("torch") or _importable("torch.nn.attention.varlen")

    def supports(self, cell: Cell) -> str:
        return super().supports(cell) or ("" if cell.variant else "packed sequences only")

    def bind(self, cell: Cell) -> Attend:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        told = modification(cell, device()).options
        given = [told[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        mask: dict[str, Any] = {"window_size": (-1, 0 if cell.causal else -1)}
        if "is_causal" in inspect.signature(attend).parameters:  # torch 2.11; 2.13 knows it by the window
            mask = {"is_causal": cell.causal}
        return of_one(lambda q, k, v: attend(q, k, v, *given, **mask))


class Flex(_HeadsFirst):
    """torch.nn.attention.flex_attention, compiled; off by default: it compiles for seconds a shape."""

    name = "flex"
    title = "flex attention"
    default = False
    variants = tuple(VARIANTS)

    def version(self) -> str:
        return f"torch {_version('torch')}, triton {_version('triton')}"

    def available(self) -> str:
        return _importable("torch") or _importable("triton")

    def supports(self, cell: Cell) -> str:
        # Seen on an H200 with torch 2.11: an illegal address from 2^31 elements on, which ends the run for everybody.
        if cell.variant == "bias" and cell.heads * cell.seqlen**2 >= 2**31:
            return "flex addresses captured arrays with 32 bits"
        return super().supports(cell)

    def bind(self, cell: Cell) -> Attend:
        import torch
        from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

        torch._dynamo.reset()  # a fresh compile a cell, or the limit on recompiles sends it to the slow path
        compiled = torch.compile(flex_attention, dynamic=False)
        changed, sees = modification(cell, device()), (lambda b, h, q, kv: q >= kv)
        if changed.mask:
            sees = and_masks(sees, changed.mask) if cell.causal else changed.mask
        mask = None
        if cell.causal or changed.mask:
            batch = cell.batch if cell.variant == "document" else None
            # Not compiled it makes the whole square of the mask, which packed sequences are too long for.
            make = torch.compile(create_block_mask) if changed.lengths else create_block_mask
            mask = make(sees, batch, None, cell.seqlen, cell.seqlen, device=device())
        return lambda q, k, v: compiled(q, k, v, score_mod=changed.score, block_mask=mask)


class _FlashAttn(Peer):
    """A package of the FlashAttention authors: `flash_attn_func(q, k, v, causal=)`, which may return (o, lse).

    `flash_attn_varlen_func` for packed sequences.
    """

    module = ""
    package = ""
    variants: tuple[str, ...] = ("softcap", "window", "packed")

    def version(self) -> str:
        return f"{self.package} {_version(self.package)}"

    def available(self) -> str:
        return _importable(self.module, self.package)

    def bind(self, cell: Cell) -> Attend:
        module, changed = importlib.import_module(self.module), modification(cell, device())
        attend = module.flash_attn_varlen_func if changed.lengths else module.flash_attn_func
        keywords = {"causal": cell.causal} | self.keywords(cell, changed)

        def call(q: Any, k: Any, v: Any) -> Any:
            result = attend(q, k, v, **keywords)
            return result[0] if isinstance(result, (tuple, list)) else result

        return of_one(call) if changed.lengths else call

    def keywords(self, cell: Cell, changed: Modification) -> dict[str, Any]:
        """What the call gets beside q, k, v and causal."""
        return changed.keywords or {}


class Fa3(_FlashAttn):
    """FlashAttention-3 from the package fa3-fwd, which has the forward alone."""

    name, title, backward = "fa3", "FlashAttention-3", False
    module, package = "fa3_fwd_interface", "fa3-fwd"


class Fa4(_FlashAttn):
    """FlashAttention-4, in the CUTLASS Python language."""

    name, title = "fa4", "FlashAttention-4"
    module, package = "flash_attn.cute", "flash-attn-4"
    variants = (*_FlashAttn.variants, "alibi", "document")

    def keywords(self, cell: Cell, changed: Modification) -> dict[str, Any]:
        if cell.variant in ("alibi", "document"):  # functions of its language
            return importlib.import_module("flashgen.bench.cute_variants").keywords(cell, changed)
        return super().keywords(cell, changed)


def roster() -> list[Peer]:
    """Every peer that the harness knows, flashgen first."""
    return [
        Flashgen(),
        Sdpa("fa2", "FlashAttention-2", "FLASH_ATTENTION"),
        Sdpa("cudnn", "cuDNN", "CUDNN_ATTENTION"),
        Flex(),
        TorchVarlen(),
        Fa3(),
        Fa4(),
    ]


def choose(names: Sequence[str] | None = None) -> tuple[list[Peer], dict[str, str]]:
    """The peers to time, and for each that was wanted but cannot run here the reason.

    Without `names`: all that are installed and on by default.
    """
    known = {peer.name: peer for peer in roster()}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}: choose from {', '.join(known)}")
    wanted = [peer for peer in known.values() if (peer.name in names if names else peer.default)]
    reasons = {peer.name: peer.available() for peer in wanted}
    return [peer for peer in wanted if not reasons[peer.name]], {name: why for name, why in reasons.items() if why}


def of_one(attend: Attend) -> Attend:
    """The function of (1, total, heads, head_dim) tensors for one of packed (total, heads, head_dim) tensors.

    Both ways a view: backward too, where indexing would fill a tensor with zeros first.
    """
    return lambda q, k, v: attend(q.squeeze(0), k.squeeze(0), v.squeeze(0)).unsqueeze(0)


def device() -> str:
    """Where the tensors of a cell are."""
    torch = importlib.import_module("torch")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown"))


def _importable(module: str, package: str | None = None) -> str:
    """Empty if the module can be imported, else the reason."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = error.name == module or module.startswith(f"{error.name}.")
        return f"{package or module} is not installed" if wanted else f"{module} needs {error.name}"
    except Exception as error:  # a broken peer must not stop the others
        return f"{module} cannot be imported ({type(error).__name__}: {first_line(error)})"
    return ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
