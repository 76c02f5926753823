"""The example that trains a character-level GPT: its text, its batches, its model and three steps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: threads only get in each other's way

SMALL = ["--device", "cpu", "--steps", "3", "--batch", "2", "--context", "16", "--layers", "1", "--heads", "2"]
SMALL += ["--head-dim", "16", "--bytes", "20000", "--sample", "5", "--attention", "sdpa"]


@pytest.fixture(scope="module")
def gpt():
    path = Path(__file__).parents[2] / "examples" / "char_gpt.py"
    spec = importlib.util.spec_from_file_location("char_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_come_in_a_fixed_order(gpt, tmp_path):
    (tmp_path / "b.py").write_text('"""module b"""\ndef f():\n    "f of b"\n    raise SystemExit\n')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text('class C:\n    """C, \\d \u00e9"""\n')
    (tmp_path / "a" / "bad.py").write_text('"""lost"""\nprint "no longer Python"\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('"""skipped"""')
    assert list(gpt.docstrings(tmp_path)) == ["C, \\d \u00e9", "module b", "f of b"]
    assert gpt.read_text(1000, tmp_path) == ("C, \\d ?\n\nmodule b\n\nf of b\n\n", "")
    assert gpt.read_text(12, tmp_path)[0] == "C, \\d ?\n\nmod"


def test_text_of_this_machine(gpt):
    train, held_out = gpt.read_text(30_000)
    assert (train, held_out) == gpt.read_text(30_000)
    assert len(train) + len(held_out) == 30_000
    assert len(held_out) > 500
    assert gpt.decode(gpt.encode(train[:200]).tolist()) == train[:200]


def test_batches_depend_on_the_seed_alone(gpt):
    tokens = torch.arange(500)
    first, again, other = (gpt.Batches(tokens, 4, 16, "cpu", seed) for seed in (1, 1, 2))
    x, y = first.draw()
    assert torch.equal(x, again.draw()[0])
    assert not torch.equal(x, other.draw()[0])
    assert torch.equal(y, x + 1)
    assert x.shape == (4, 16)
    with pytest.raises(SystemExit, match="raise --bytes"):
        gpt.Batches(tokens, 4, 500, "cpu", 0)


def test_model_is_causal(gpt):
    torch.manual_seed(0)
    model = gpt.CharGPT(16, 2, 2, 16, "sdpa", torch.bfloat16)
    tokens = torch.randint(len(gpt.ALPHABET), (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (1, 16, len(gpt.ALPHABET))
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_three_steps_repeat_and_are_reported(gpt, tmp_path, capsys):
    result = gpt.main([*SMALL, "--json", str(tmp_path / "curve.json")])
    assert len(result["losses"]) == 3
    assert result["losses"][0] == pytest.approx(4.56, abs=0.1)  # the logarithm of 96 characters
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"final loss {result['final']:.4f} (train, mean of the last 20 steps) | val ")
    assert last.endswith(" tokens/s")
    assert json.loads((tmp_path / "curve.json").read_text())["losses"] == result["losses"]
    assert gpt.main(SMALL)["losses"] == result["losses"]
    assert gpt.main([*SMALL, "--seed", "1"])["losses"] != result["losses"]


def test_flashgen_trains_like_sdpa(gpt):
    """The same weights and batches: what is left is rounding."""
    ours, theirs = (gpt.main([*SMALL, "--sample", "0", "--attention", x])["losses"] for x in ("flashgen", "sdpa"))
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_the_seed_alone_decides_the_weights(gpt):
    def weights(attention):
        torch.manual_seed(0)
        return gpt.CharGPT(16, 1, 2, 16, attention, torch.bfloat16).state_dict()

    first, *others = (weights(attention) for attention in gpt.ATTENTIONS)
    assert len(others) == 2
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_cudnn_needs_a_gpu(gpt, capsys):
    with pytest.raises(SystemExit):
        gpt.parse([*SMALL, "--attention", "cudnn"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("--attention cudnn runs on a GPU alone; use sdpa or flashgen on the CPU")


def test_cudnn_is_restricted_to_itself(gpt):
    assert torch.backends.cuda.math_sdp_enabled()
    with gpt.backend("cudnn"):
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
    with gpt.backend("sdpa"):
        assert torch.backends.cuda.math_sdp_enabled()


def test_the_documented_commands_are_understood(gpt):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    lines = [line for line in (gpt.__doc__ + readme).splitlines() if line.startswith("    python examples/char_gpt.py")]
    assert len(lines) == 6
    for line in lines:
        assert gpt.parse([*line.split()[2:], "--device", "cuda"]).attention in gpt.ATTENTIONS


def test_training_lowers_the_loss(gpt):
    losses = gpt.main([*SMALL, "--steps", "30", "--lr", "1e-2", "--sample", "0"])["losses"]
    assert losses[-1] < losses[0] - 0.5


def test_learning_rate_warms_up_and_falls(gpt):
    trainer = gpt.Trainer.__new__(gpt.Trainer)
    trainer.args = gpt.parse([*SMALL, "--steps", "100", "--lr", "1.0"])
    rates = [trainer.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_defaults_follow_the_device(gpt):
    small, large = gpt.parse(["--device", "cpu"]), gpt.parse(["--device", "cuda", "--steps", "7"])
    assert gpt.parse(["--device", "cuda", "--small"]).context == 128
    assert (small.steps, small.heads, large.steps, large.context) == (60, 4, 7, 1024)
    with pytest.raises(SystemExit):
        gpt.parse(["--steps", "0"])
