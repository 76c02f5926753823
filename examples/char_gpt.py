"""Train a small character-level GPT, with flashgen's attention, with torch's or with cuDNN's.

The text is the documentation strings of Python's standard library, which lie on every machine that has Python.
The same seed gives each attention the same weights and batches, so that losses and tokens a second can be compared:

    python examples/char_gpt.py --attention flashgen --steps 200
    python examples/char_gpt.py --attention sdpa --steps 200

and in a larger model, on a GPU:

    python examples/char_gpt.py --attention flashgen --head-dim 128 --context 2048
    python examples/char_gpt.py --attention cudnn --head-dim 128 --context 2048

Weights are float32. On the GPU the matrix products run in bfloat16 by autocast; on the CPU only the inputs of the
attention are rounded to bfloat16, whichever attention it is (flashgen runs its interpreter there: right, not fast).
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # newline and printable ASCII; what else there is becomes "?"
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "_bundled"}
ATTENTIONS = ("flashgen", "sdpa", "cudnn")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HELD_OUT = 10  # every tenth documentation string is for validation


# --- the text ---------------------------------------------------------------------------------------------------------


def docstrings(root: Path) -> Iterator[str]:
    """The documentation strings of every Python file under `root`: files by path, strings by breadth in the file.

    The files are parsed, never imported. Files that this Python cannot parse are passed over.
    """
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # odd escapes in other people's files
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def read_text(limit: int, root: Path | None = None) -> tuple[str, str]:
    """Training and held-out text over ALPHABET, at most `limit` characters together."""
    known, size = set(ALPHABET), 0
    parts: tuple[list[str], list[str]] = ([], [])
    for index, text in enumerate(docstrings(root or Path(sysconfig.get_paths()["stdlib"]))):
        clean = "".join(c if c in known else "?" for c in text.expandtabs()) + "\n\n"
        clean = clean[: limit - size]
        size += len(clean)
        parts[index % HELD_OUT == HELD_OUT - 1].append(clean)
        if size >= limit:
            break
    return "".join(parts[0]), "".join(parts[1])


def encode(text: str) -> torch.Tensor:
    """Text over ALPHABET -> int64 token numbers, (length,)."""
    table = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([table[character] for character in text], dtype=torch.long)


def decode(tokens: list[int]) -> str:
    """Token numbers -> text."""
    return "".join(ALPHABET[token] for token in tokens)


class Batches:
    """Random windows of a text; the seed alone decides which, whatever the device and the attention."""

    def __init__(self, tokens: torch.Tensor, batch: int, context: int, device: str, seed: int) -> None:
        if len(tokens) <= context + 1:
            raise SystemExit(f"The text has {len(tokens)} characters, too few for --context {context}: raise --bytes.")
        self.tokens, self.batch, self.device = tokens.to(device), batch, device
        self.generator = torch.Generator().manual_seed(seed)
        self.window = torch.arange(context, device=device)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 (batch, context): the targets are the inputs one character on."""
        last = len(self.tokens) - len(self.window) - 1
        start = torch.randint(last + 1, (self.batch, 1), generator=self.generator).to(self.device)
        return self.tokens[start + self.window], self.tokens[start + self.window + 1]


# --- the model --------------------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, which: str) -> torch.Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim) tensors in 16 bits; the result has the same shape."""
    if which == "flashgen":
        import flashgen

        return flashgen.attention(q, k, v, causal=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def backend(which: str) -> AbstractContextManager:
    """Around calls of torch's attention: of its implementations cuDNN's alone for "cudnn", any for the others."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if which == "cudnn" else nullcontext()


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)); x is (batch, seqlen, width)."""

    def __init__(self, heads: int, head_dim: int, attention: str, dtype: torch.dtype) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.head_dim, self.attention, self.dtype = heads, head_dim, attention, dtype
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norm1(x)).to(self.dtype).view(batch, seqlen, 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(2)  # strided views of one tensor: nothing is copied
        o = attend(q, k, v, self.attention).reshape(batch, seqlen, -1)
        x = x + self.out(o.to(x.dtype))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """Characters in, logits of the next character out; learned positions, output weights tied to the embedding."""

    def __init__(
        self, context: int, layers: int, heads: int, head_dim: int, attention: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        width = heads * head_dim
        self.context = context
        self.embed, self.position = nn.Embedding(len(ALPHABET), width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, head_dim, attention, dtype) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)
        for block in self.blocks:  # what is added to the residual stream starts small, as in GPT-2
            for layer in (block.out, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, seqlen <= context) -> logits (batch, seqlen, characters)."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next character, in nats."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


# --- training ---------------------------------------------------------------------------------------------------------


class Trainer:
    """One training run: model, optimiser, data and the losses so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        train, held_out = read_text(args.bytes)
        self.characters = len(train), len(held_out)
        torch.manual_seed(args.seed)
        shape = (args.context, args.layers, args.heads, args.head_dim)
        self.model = CharGPT(*shape, args.attention, DTYPES[args.dtype]).to(args.device)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.scaler = torch.amp.GradScaler(args.device, enabled=args.device == "cuda" and args.dtype == "float16")
        self.batches = Batches(encode(train), args.batch, args.context, args.device, args.seed)
        self.held_out = Batches(encode(held_out), args.batch, args.context, args.device, args.seed + 1)
        self.losses: list[float] = []

    def autocast(self) -> torch.autocast:
        """16-bit matrix products on the GPU, nothing on the CPU."""
        return torch.autocast(self.args.device, DTYPES[self.args.dtype], enabled=self.args.device == "cuda")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of --lr."""
        warm = max(1, self.args.steps // 10)
        if step < warm:
            return self.args.lr * (step + 1) / warm
        done = (step - warm) / max(1, self.args.steps - warm)
        return self.args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def step(self, number: int) -> torch.Tensor:
        """One step of the optimiser; the loss in nats, still on the device."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate(number)
        with self.autocast(), backend(self.args.attention):
            loss = self.model.loss(*self.batches.draw())
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss.detach()

    def train(self, console: Console) -> float:
        """All steps, with a progress bar; tokens a second, the first steps (compiling, warming) not counted."""
        steps, pending, begin = self.args.steps, [], time.perf_counter()
        uncounted = min(3, steps - 1)
        with make_progress(console) as progress:
            task = progress.add_task("training", total=steps, loss=float("nan"))
            for number in range(steps):
                if number == uncounted:
                    synchronize(self.args.device)
                    begin = time.perf_counter()
                pending.append(self.step(number))
                if number % 10 == 9 or number + 1 == steps or self.args.device == "cpu":
                    self.losses += [loss.item() for loss in pending]
                    pending.clear()
                    progress.update(task, loss=self.losses[-1])
                    self._log(progress, number + 1)
                progress.advance(task)
            synchronize(self.args.device)
        return (steps - uncounted) * self.args.batch * self.args.context / (time.perf_counter() - begin)

    def _log(self, progress: Progress, done: int) -> None:
        """A line now and then, for logs in which the bar cannot move."""
        if done % max(10, self.args.steps // 100 * 10) == 0:
            progress.console.print(f"step {done:5d}  loss {self.losses[-1]:.4f}", highlight=False)

    @torch.no_grad()
    def validate(self, count: int = 8) -> float:
        """Mean loss in nats over `count` batches of text that was never trained on; always the same batches."""
        with self.autocast(), backend(self.args.attention):
            return sum(self.model.loss(*self.held_out.draw()).item() for _ in range(count)) / count

    @torch.no_grad()
    def sample(self, length: int, prompt: str = "Return the ") -> str:
        """Text from the model: one character at a time, at temperature 0.8, from the last `context` characters.

        For "cudnn" by any of torch's implementations: cuDNN plans each length anew, and refuses some.
        """
        tokens = encode(prompt).tolist()
        generator = torch.Generator().manual_seed(self.args.seed)
        for _ in range(length):
            window = torch.tensor([tokens[-self.args.context :]], device=self.args.device)
            with self.autocast():
                logits = self.model(window)[0, -1].float().cpu()
            tokens.append(int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)))
        return decode(tokens)


def synchronize(device: str) -> None:
    """Waits for the device, so that a host clock can be read."""
    if device == "cuda":
        torch.cuda.synchronize()


def make_progress(console: Console) -> Progress:
    """The bar: steps done, loss, time spent and left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


SIZES = {  # what a flag that is not given means: on the CPU half a minute for two cores, on the GPU a real small model
    "small": {"steps": 60, "batch": 8, "context": 128, "layers": 2, "heads": 4, "head_dim": 32, "lr": 3e-3},
    "large": {"steps": 200, "batch": 16, "context": 1024, "layers": 6, "heads": 8, "head_dim": 64, "lr": 1e-3},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with the device and the sizes that follow from it filled in."""
    parser = argparse.ArgumentParser(
        description="Train a character-level GPT on the documentation strings of Python's standard library.",
        epilog="Sizes not given, large on a GPU: " + "; ".join(f"{name}: {sizes}" for name, sizes in SIZES.items()),
    )
    parser.add_argument(
        "--attention", choices=ATTENTIONS, default="flashgen", help="sdpa: torch's; cudnn: cuDNN's, on a GPU"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="the small sizes on a GPU too")
    for name in ("steps", "batch", "context", "layers", "heads", "head-dim"):
        parser.add_argument(f"--{name}", type=positive)
    parser.add_argument("--lr", type=float, help="highest learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the attention's inputs")
    parser.add_argument("--bytes", type=positive, default=400_000, help="how much text to read, at most")
    parser.add_argument("--sample", type=int, default=200, help="characters to write at the end")
    parser.add_argument("--json", type=Path, help="write the loss curve to this file")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.attention == "cudnn" and args.device == "cpu":
        parser.error("--attention cudnn runs on a GPU alone; use sdpa or flashgen on the CPU")
    for name, value in SIZES["large" if args.device == "cuda" and not args.small else "small"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: list[str] | None = None) -> dict:
    """Trains, validates, samples; returns and, with --json, writes the curve."""
    args, console = parse(argv), Console(highlight=False)
    trainer = Trainer(args)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(
        f"{args.attention} attention on {args.device}, {args.dtype}; {parameters / 1e6:.2f} M parameters; ", end=""
    )
    console.print(f"text: {trainer.characters[0]:,} characters to train on, {trainer.characters[1]:,} held out")
    rate = trainer.train(console)
    final = sum(trainer.losses[-20:]) / len(trainer.losses[-20:])
    val = trainer.validate()
    if args.sample > 0:
        console.rule("a sample")
        console.print(trainer.sample(args.sample), markup=False)
        console.rule()
    result = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result |= {
        "parameters": parameters,
        "losses": trainer.losses,
        "final": final,
        "val": val,
        "tokens_per_second": rate,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"final loss {final:.4f} (train, mean of the last 20 steps) | val {val:.4f} | {rate:,.0f} tokens/s")
    return result


if __name__ == "__main__":
    main()
