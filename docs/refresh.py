"""Rewrites the live blocks of the documents, and the pictures of the masks, from the program: `python docs/refresh.py`.

A live block lies between two comments, <!-- live: NAME --> and <!-- end -->; what stands between them is thrown away
and made again by the function of that NAME below. tests/unit/test_readme.py fails where that would change anything.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

from flashgen import build, catalog, lower  # noqa: E402
from flashgen.cli import mask, options  # noqa: E402
from flashgen.cli.show import passes_text  # noqa: E402
from flashgen.ir import verify  # noqa: E402
from flashgen.ir.nodes import Stmt  # noqa: E402
from flashgen.ir.printer import kernel_text  # noqa: E402
from flashgen.machine import base, sm80, sm90  # noqa: E402
from flashgen.plan.arch import ARCHES, KIB  # noqa: E402
from flashgen.spec import Spec  # noqa: E402

EXAMPLES = ROOT / "examples" / "masks"
PICTURES = ROOT / "docs" / "masks"
FILES = (ROOT / "README.md", ROOT / "docs" / "architecture.md", EXAMPLES / "README.md")
BLOCK = re.compile(r"(<!-- live: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SPEC, ARCH = Spec(64, 64, causal=True), ARCHES["sm_80"]  # the kernel that the README follows

# Parts of a dump: the first line of each part, and its last (patterns, searched for from the part before).
Parts = tuple[tuple[str, str], ...]
TILE_PARTS: Parts = (
    (r"^kernel ", r"  grid batch"),
    (r"shared k_tile", r"shared v_tile"),
    (r"register s:", r"register o_acc"),
    (r"for kv_block", r"o_acc \+= gemm"),
    (r"o_out = map", r"o\[batch"),
)
MACHINE_PARTS: Parts = (
    (r"for kv_block", r"mma_sync s"),
    (r"if kv_start", r"map_fragment s"),
    (r"map_fragment p,", r"mma_sync o_acc"),
)
CUDA_PARTS: Parts = (
    (r"for \(int kv_block", r"multiply_shared"),
    (r"if \(kv_start", r"s\[i\]\[j\] ="),
    (r"p\[i\]\[j\] = ", r"p\[i\]\[j\] = "),
    (r"reduce_rows<Row_sum>", r"reduce_rows<Row_sum>"),
    (r"multiply_packed", r"^  }"),
)


def excerpt(text: str, parts: Parts) -> str:
    """Some parts of a text in order, with "..." where lines are left out. Raises LookupError for a part not found."""
    lines = text.splitlines()
    result: list[str] = []
    end = 0
    for pattern, last_pattern in parts:
        first = _find(lines, pattern, end)
        if first > end:
            result.append(f"{' ' * _indent(lines[first])}...")
        end = _find(lines, last_pattern, first) + 1
        result += [line for line in lines[first:end] if line.strip()]
    if end < len(lines):
        result.append(f"{' ' * _indent(result[-1])}...")
    return "\n".join(result)


def _find(lines: list[str], pattern: str, start: int) -> int:
    for position in range(start, len(lines)):
        if re.search(pattern, lines[position]):
            return position
    raise LookupError(f"no line matches {pattern!r} from line {start + 1} on: choose another in docs/refresh.py")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def fenced(text: str, language: str = "text") -> str:
    """A code block."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; what would end a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


@cache
def stages() -> build.Stages:
    """Every stage of the forward kernel that is followed."""
    return build.forward(SPEC, ARCH)[0]


def tile() -> str:
    return fenced(excerpt(kernel_text(stages().tile), TILE_PARTS))


def plan() -> str:
    return fenced(stages().plan.text())


def verdicts() -> str:
    """The first three of the ranking and of the rejections."""
    lines = stages().plan.explain().splitlines()
    ranking, rejected = _find(lines, "candidates that fit", 0), _find(lines, r"^  rejected:", 0)
    shown = [*lines[ranking : ranking + 4], "    ...", *lines[rejected : rejected + 4], "    ..."]
    return fenced("\n".join(shown))


def changes() -> str:
    """The passes that changed this kernel."""
    heads = [line.removeprefix("=== ") for line in passes_text(stages()).splitlines() if line.startswith("=== ")]
    return fenced("\n".join(heads[1:]))


def machine() -> str:
    return fenced(excerpt(kernel_text(stages().machine), MACHINE_PARTS))


def cuda() -> str:
    return fenced(excerpt(stages().source.text, CUDA_PARTS), "cuda")


def chips() -> str:
    """The chip records."""
    rows = [
        (
            f"`{arch.name}`",
            arch.title,
            f"{arch.shared_per_block // KIB} KiB",
            arch.family,
            "yes" if arch in catalog.COMPILED else "no",
        )
        for arch in ARCHES.values()
    ]
    return table(("`arch`", "chips", "shared memory of a block", "family", "compiled by `make generate`"), rows)


def passes() -> str:
    """Every pass with its sentence and its invariant, in the order in which they run."""
    rows = []
    for step in (*lower.TILE_PASSES, *(step for steps in lower.FAMILIES.values() for step in steps)):
        sentence, invariant = _docstring(step)
        module = step.__module__.removeprefix("flashgen.").replace(".", "/")
        rows.append((f"`{module}.py` `{step.__name__}`", sentence, invariant))
    return table(("pass", "what it does", "invariant"), rows)


def _docstring(step: Callable) -> tuple[str, str]:
    """The first line, and what follows "Invariant:"."""
    text = inspect.getdoc(step) or ""
    found = re.search(r"Invariant: (.*?)(?:\n\n|\Z)", text, re.DOTALL)
    return text.split("\n")[0], " ".join(found[1].split()) if found else ""


def tile_statements() -> str:
    """The TILE statements and their docstrings."""
    return table(("statement", "meaning"), [(f"`{kind.__name__}`", _meaning(kind)) for kind in verify.TILE_STATEMENTS])


def machine_statements() -> str:
    """The MACHINE statements: meaning and precondition."""
    kinds = [
        kind
        for module in (base, sm80, sm90)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, base.MachineStmt) and kind.NAME
    ]
    kinds = list(dict.fromkeys(kinds))
    rows = [(f"`{kind.__name__}`", kind.FAMILY, _meaning(kind), kind.NEEDS) for kind in kinds]
    return table(("statement", "family", "meaning", "what must hold before it"), rows)


# The statements whose names say all, and which have no docstring.
PLAIN = {"For": "The body for each value of the axis from start to stop.", "If": "The body where the condition holds."}


def _meaning(kind: type[Stmt]) -> str:
    """The first paragraph of a statement's own docstring (a dataclass without one is given its signature)."""
    text = inspect.getdoc(kind) or ""
    if text.startswith(f"{kind.__name__}("):
        return PLAIN[kind.__name__]
    return " ".join(text.split("\n\n")[0].split())


def layers() -> str:
    """The rows of LAYERS in tests/unit/test_layering.py."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_layering.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            rows = [", ".join(sorted(row)) for row in ast.literal_eval(node.value)]
            return fenced("  <-  ".join(rows).replace("  <-  build", "\n  <-  build"))
    raise LookupError("tests/unit/test_layering.py has no LAYERS")


def examples() -> list[Path]:
    """The examples of masks and score functions."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "compare"]


def masks() -> str:
    """A section for each example: its docstring, its picture, and its code without what makes it a script."""
    parts = []
    for path in examples():
        source = path.read_text(encoding="utf-8")
        sentence = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
        code = source.partition("\nif __name__")[0].split('"""', 2)[2]
        picture = f"![{path.stem}](../../docs/masks/{path.stem}.png)"
        parts.append(f"## {path.stem}\n\n{sentence}\n\n{picture}\n\n{fenced(code.strip(), 'python')}")
    return "\n".join(parts)


def drawing(path: Path) -> mask.Drawing:
    """What the picture of an example shows: fewer queries than keys, so that both alignments look different."""
    causal, visible, score = options.functions_of(path)
    sizes = mask.Sizes(56, 64, heads=4, head=1, batch=0, block_q=8, block_kv=8)
    return mask.draw(Spec(64, 64, causal=causal, mask=visible, score=score), sizes)


BLOCKS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        tile,
        plan,
        verdicts,
        changes,
        machine,
        cuda,
        chips,
        passes,
        tile_statements,
        machine_statements,
        layers,
        masks,
    )
}


def refreshed(text: str) -> str:
    """The text with every live block made again. Raises KeyError for a name that is not in BLOCKS."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)


def main() -> None:
    """Rewrite the files that are stale, and name them, and draw the pictures again (with matplotlib)."""
    for path in FILES:
        old = path.read_text(encoding="utf-8")
        new = refreshed(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'rewritten' if new != old else 'up to date'}")
    for path in examples():
        mask.write_png(drawing(path), str(PICTURES / f"{path.stem}.png"))


if __name__ == "__main__":
    main()
