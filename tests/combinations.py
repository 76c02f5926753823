"""Calls that combine what calls can bring, drawn at random, and the oracle for each: for the CPU and for the GPU."""

import random

import denominators
import support
import torch

import flashgen
from flashgen import masks, scores

P, SEED = 0.25, 2**63 + 17
QUERIES, KEYS = (70, 0, 33, 1), (150, 40, 20, 0)  # of packed sequences
LENGTHS, USED = (70, 150), (150, 0, 61, 1)  # of batches of one length
KINDS = ("plain", "padded", "packed")


def draw(seed, *kinds):
    """The options of a kernel and of a call, by name. kinds: of KINDS, one of which is drawn."""
    pick = random.Random(seed)
    return {
        "kind": pick.choice(kinds or KINDS),
        "causal": pick.choice((False, True, "top-left")),
        "window": pick.choice((None, None, (30, 0), (9, 20), (None, 5))),
        "softcap": pick.choice((None, None, 3.0)),
        "mask": pick.choice((None, None, "document", "dilated")),
        "score": pick.choice((None, None, "alibi", "bias")),
        "sinks": pick.random() < 0.4,
        "dropout": pick.random() < 0.4,
        "listed": pick.random() < 0.4,
        "deterministic": pick.random() < 0.3,
        "heads": pick.choice(((4, 2), (2, 2), (3, 1))),
    }


def of_keys(b, h, q_idx, kv_idx, ids):
    """Documents of keys: queries see those of their own remainder."""
    return ids[b, kv_idx] == (q_idx // 7) % 3


MASKS = {"document": of_keys, "dilated": masks.dilated(3), None: None}
SCORES = {"alibi": scores.alibi, "bias": scores.bias, None: None}


class Case:
    """One draw on a device: its kernel, its arrays and what it must give."""

    def __init__(self, seed, device, head_dim, *kinds, dtype=torch.float16, **options):
        self.drawn = draw(seed, *kinds)
        self.kind, self.device = self.drawn["kind"], device
        self.packed = self.kind == "packed"
        made = {name: self.drawn[name] for name in ("causal", "window", "softcap", "sinks", "dropout", "deterministic")}
        made |= {"mask_mod": MASKS[self.drawn["mask"]], "score_mod": SCORES[self.drawn["score"]]}
        self.kernel = flashgen.compile(head_dim, dtype=dtype, varlen=self.packed, **made, **options)
        self.count = 4
        self.queries = QUERIES if self.packed else (LENGTHS[0],) * self.count
        self.keys = {"plain": (LENGTHS[1],) * self.count, "padded": USED, "packed": KEYS}[self.kind]
        self.arrays = self._arrays(head_dim, dtype, seed)
        self.given = self._given(seed)

    def _arrays(self, head_dim, dtype, seed):
        """q, k, v, the sinks where there are any, and behind them the gradient of o."""
        rows = (1, sum(self.queries), sum(self.keys)) if self.packed else (self.count, *LENGTHS)
        made = support.random_inputs(*rows, *self.drawn["heads"], head_dim, dtype=dtype, device=self.device, seed=seed)
        if self.kind == "padded":
            for number, used in enumerate(USED):
                for x in made[1:3]:
                    x[number, used:] = float("nan")
        *arrays, do = (x[0] if self.packed else x for x in made)
        sinks = torch.linspace(-2.0, 4.0, self.drawn["heads"][0], device=self.device)
        return [*arrays, *([sinks] if self.drawn["sinks"] else []), do]

    def _given(self, seed):
        """What the call brings beside arrays that have gradients."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(self.queries), max(self.keys)
        ids = torch.randint(0, 3, (self.count, longest[1]), generator=generator).int().to(self.device)
        bias = torch.randn(self.count, self.drawn["heads"][0], *longest, generator=generator).to(self.device)
        self.ids = (ids,) if self.drawn["mask"] == "document" else ()
        self.biases = (bias,) if self.drawn["score"] == "bias" else ()
        given = {"mask_aux": self.ids, "score_aux": self.biases}
        given |= {"dropout_p": P, "dropout_seed": SEED} if self.drawn["dropout"] else {}
        if self.kind == "padded":
            given["seqused_k"] = torch.tensor(USED, dtype=torch.int32, device=self.device)
        of_keys_alone = not self.drawn["causal"] and self.drawn["window"] is None and self.drawn["mask"] != "dilated"
        if self.drawn["listed"] and not self.packed and (of_keys_alone or self.kind == "plain"):
            options = {name: self.drawn[name] for name in ("causal", "window")}
            sizes = (self.count, 1, *LENGTHS)
            mask = MASKS[self.drawn["mask"]]
            given["block_mask"] = flashgen.block_mask(mask, self.ids, *sizes, like=self.arrays[0], **options)
        return given

    def told(self):
        """The offsets of packed sequences."""
        lengths = (self.queries, self.keys) if self.packed else ()
        made = (torch.tensor([0, *of]).cumsum(0).int().to(self.device) for of in lengths)
        return tuple(made)

    def attend(self, *arrays):
        q, k, v, *sinks = arrays
        more = {"sinks": sinks[0]} if sinks else {}
        return self.kernel(q, k, v, *self.told(), return_lse=True, check=True, **self.given, **more)

    def dense(self, *arrays, dtype=torch.float64):
        """(o, lse) of each sequence by itself, put together as the call gives them."""
        q, k, v, *sinks = arrays
        of_q, of_k = ([0, *torch.tensor(of).cumsum(0).tolist()] for of in (self.queries, self.keys))
        sizes = (self.count, q.shape[-2], max(self.queries), max(self.keys))
        keep = torch.from_numpy(flashgen.dropout_mask(SEED, 0, P, *sizes)).to(self.device)
        found = []
        for number in range(self.count):
            one, used = slice(number, number + 1), self.keys[number]
            if self.packed:
                rows, cols = slice(of_q[number], of_q[number + 1]), slice(of_k[number], of_k[number + 1])
                own = q[rows][None], k[cols][None], v[cols][None]
            else:
                own = q[one], k[one, :used], v[one, :used]
            options = {name: getattr(self.kernel.spec, name) for name in ("causal", "mask", "score")}
            options["aux"] = {"mask_ids": [x[one] for x in self.ids], "score_biases": [x[one] for x in self.biases]}
            options["aux"] = {name: of[0] for name, of in options["aux"].items() if of}
            if self.drawn["dropout"]:
                options |= {"keep": keep[one, :, : own[0].shape[1], :used], "p": P}
            found.append(denominators.dense(*own, *sinks, dtype=dtype, **options))
        if self.packed:
            return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], dim=1)
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def failures(self):
        """Sentences on what is wrong, forward and backward; dsinks by the rule of `denominators`."""
        *arrays, do = self.arrays
        generator = torch.Generator(self.device).manual_seed(1)
        heads, rows = do.shape[-2], do.shape[-3]
        shape = (heads, rows) if self.packed else (do.shape[0], heads, rows)
        dlse = torch.randn(shape, device=self.device, generator=generator)
        support.poison(*self.arrays)
        o, lse, gradients = denominators.evaluate(self.attend, arrays, do, dlse)
        ref, low = (
            denominators.evaluate(lambda *x, dtype=dtype: self.dense(*x, dtype=dtype), arrays, do, dlse, dtype)
            for dtype in (torch.float64, do.dtype)
        )
        found = [support.lse_violation(lse, ref[1]), support.violation("o", o, ref[0], low[0], 2.0, do.dtype)]
        for name, x, exact, rough in zip(denominators.NAMES, gradients, ref[2], low[2], strict=False):
            found.append(support.violation(name, x, exact, rough, 3.0, do.dtype))
        if self.drawn["sinks"]:
            one = (None, ref[1][None], ref[2]) if self.packed else ref
            p = P if self.drawn["dropout"] else 0.0
            wide = do[None] if self.packed else do
            found.append(denominators._dsinks_violation(gradients[3], one, wide, arrays[3], p))
        return [f"{self.drawn}: {sentence}" for sentence in found if sentence]
