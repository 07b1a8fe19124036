"""Patching: what a metric does when values of one input are put into the run of another.

Three ways: one backward for an estimate of every element (`attribution_patch`), one run for each
patch (`patch_sweep`), and direct paths only (`path_patch`).
Axes: b row, s token, d sublayer that reads, c component that was written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dsv4.activation_cache import ActivationCache
from dsv4.bench import Bench, Metric, Pair, as_number
from dsv4.effects import Effects, Estimates
from dsv4.hooks import HookPoint
from dsv4.kernels.numeric import wide
from dsv4.sweep import Grid, Saved, Sweep

# Widths that estimates are summed over: no single channel of them has a meaning of its own.
SUMMED = ("hidden", "D", "id", "q_lora_rank", "o_lora_rank", "vocab")
# What writes to the streams, by the sublayer whose output it is a part of.
SENDERS = {
    "token_embeddings": None,
    "attention_output": "attention",
    "attention_head_results": "attention",
    "mlp_output": "mlp",
    "routed_output": "mlp",
    "shared_expert_output": "mlp",
}
RECEIVERS = ("attention_collapsed", "mlp_collapsed", "readout")
MIXING = [
    *(f"layers.*.{site}_{leaf}" for site in ("attention", "mlp") for leaf in ("pre", "post", "comb")),
    "readout_weights",
]


class Patching:
    """Mixed into the model.

    Everywhere: clean and corrupt are ids or text with as many tokens in each row; metric takes
    logits [b, s, vocab] (with logits_to_keep=n each row's last n) and returns one number, a tensor;
    direction "noise" puts values of corrupt into the run of clean, "denoise" the reverse.
    """

    def attribution_patch(
        self,
        clean,
        corrupt,
        metric: Metric,
        names,
        *,
        attention_mask: Tensor | None = None,
        direction: str = "noise",
        logits_to_keep: int | None = None,
    ) -> Estimates:
        """Estimate what patching would do, for every element of these values, with one backward.

        (other value - value) * gradient, of first order in the difference, summed over widths
        (hidden, D, ...); rows, tokens, heads, streams, slots and neurons stay apart. Routing and
        selection do not flip in it.

        Args:
            names: names, globs or predicates; of a pattern the floating values.
        """
        pair = Pair.of(self, clean, corrupt, attention_mask, direction)
        points = {n: self.hook_dict[n] for n in self.match_names(names)}
        chosen = [n for n, p in points.items() if p.dtype != "i" and p.layer not in self.skipped]
        if not chosen:
            raise ValueError(f"attribution_patch: {names!r} means no value with a gradient")
        run = {"attention_mask": pair.valid, "logits_to_keep": logits_to_keep}
        with torch.no_grad():
            logits, other = self.run_with_cache(pair.other, chosen, **run)
            other_metric = float(as_number(metric, logits))
        # The gradient hook makes the graph begin at the embeddings where no weight requires one.
        begins = [("token_embeddings", lambda gradient, hook: None)]
        with torch.enable_grad(), self.hooks(bwd_hooks=begins):
            logits, own = self.run_with_cache(pair.base, chosen, detach=False, **run)
            value = as_number(metric, logits)
            if not value.requires_grad:
                raise ValueError("attribution_patch: the metric has no gradient to the logits")
            reached = [n for n in chosen if own[n].requires_grad]
            found = torch.autograd.grad(value, [own[n] for n in reached], allow_unused=True)
        gradients = dict(zip(reached, found, strict=True))
        estimates, axes = {}, {}
        for name in chosen:
            gradient = gradients.get(name)
            gradient = torch.zeros_like(own[name]) if gradient is None else gradient
            point, change = self.hook_dict[name], wide(other[name]) - wide(own[name].detach())
            # Of masked scores: the difference of infinities, and nothing passes there.
            effect = (change * wide(gradient)).nan_to_num(0.0, 0.0, 0.0)
            estimates[name], axes[name] = _over_widths(effect, point, self.num_heads)
        return Estimates(estimates, axes, float(value.detach()), other_metric)

    @torch.no_grad()
    def patch_sweep(
        self,
        clean,
        corrupt,
        metric: Metric,
        over: Mapping[str, Any],
        *,
        attention_mask: Tensor | None = None,
        direction: str = "noise",
        logits_to_keep: int | None = None,
        batch: int = 8,
        file: str | Path | None = None,
        progress: bool = True,
    ) -> Effects:
        """Patch every combination, each in a run of its own.

        Args:
            over: "name": the last part of a value's name, or several ("layer_output"); and any of
                "layers": layers, all that have the value where left out;
                "pos": positions of the row or "each"; all at once where left out;
                one of "heads", "streams", "slots", "experts": numbers or "each"; all at once where
                left out. Over experts, expert_outputs means an expert's part of the routed output,
                whatever slot it has, or none, in either run.
            batch: patches in one run; a run has batch * b rows.
            file: results are written there after every run, and taken up again from there: a sweep
                that was stopped goes on. ValueError when it holds another sweep.
            progress: show a bar.
        Runs enter at the layer of the patch with the streams of the unpatched run, or, where that
        is fewer layers * tokens, run all layers from the batch's first patched position on, behind
        a KV cache of the unpatched run (not for values with keys or entries, nor while a hook, a
        capture or skip_layers is open). Contexts that are open around the call (freeze, ablate,
        ...) act in all runs: a frozen cache of one row keeps routing and selection from flipping.
        """
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"patch_sweep: batch={batch!r}, expected an int >= 1")
        pair = Pair.of(self, clean, corrupt, attention_mask, direction)
        grid = Grid.of(self, over, pair.valid)
        bench = Bench(self, pair, metric, logits_to_keep)
        about = {
            "ids": [pair.base.tolist(), pair.other.tolist(), pair.valid.tolist()],
            "axes": {axis: list(labels) for axis, labels in grid.axes.items()},
            "leaves": list(grid.leaves),
            "metrics": [f"{bench.base:.6g}", f"{bench.other:.6g}"],
            "model": [repr(self.config), logits_to_keep],
        }
        saved = Saved(file, grid.shape, about)
        with tqdm(
            total=saved.done.numel(),
            initial=int(saved.done.sum()),
            desc="patching",
            disable=not progress,
        ) as bar:
            sweep = None if bool(saved.done.all()) else Sweep(self, bench, grid)
            for layer, leaf, first, patches in grid.cells():
                for begin in range(0, len(patches), batch):
                    part = patches[begin : begin + batch]
                    place = first + begin
                    if bool(saved.done.view(-1)[place : place + len(part)].all()):
                        continue
                    saved.put(place, sweep.measure(layer, leaf, part))
                    bar.update(len(part))
        return Effects(
            grid.axes,
            saved.metric,
            saved.routing_flips,
            saved.selection_flips,
            bench.base,
            bench.other,
        )

    @torch.no_grad()
    def path_patch(
        self,
        clean,
        corrupt,
        senders,
        receivers,
        metric: Metric,
        *,
        attention_mask: Tensor | None = None,
        direction: str = "noise",
        logits_to_keep: int | None = None,
        batch: int = 8,
        progress: bool = False,
    ) -> Effects:
        """Patch direct paths: what each receiver reads, changed by what each sender wrote alone.

        The streams carry a sender's output to a receiver's input with one weight for each token,
        R[d, c] of `cache.residual.read_matrix()`, mixing as in the unpatched run. So
        R[d, c] * (other output - output) is added to what the receiver reads, before its norm;
        nothing between them changes, and what comes after the receiver follows.

        Args:
            senders: names of token_embeddings, attention_output, mlp_output, routed_output,
                shared_expert_output, or attention_head_results, which stands for each head.
            receivers: names of attention_collapsed, mlp_collapsed or readout.
        Returns:
            Effects over "senders" (names, or (name, head)) and "receivers"; no effect where the
            sender does not come before the receiver.
        """
        pair = Pair.of(self, clean, corrupt, attention_mask, direction)
        written = self._parts_of_paths(senders, tuple(SENDERS), "sender")
        read = self._parts_of_paths(receivers, RECEIVERS, "receiver")
        bench = Bench(self, pair, metric, logits_to_keep)
        own = self.run_with_cache(pair.base, [*MIXING, *written], attention_mask=pair.valid)[1]
        other = self.run_with_cache(pair.other, written, attention_mask=pair.valid)[1]
        weights = _read_weights(own)
        labels = [
            label
            for name in written
            for label in ([(name, head) for head in range(self.num_heads)] if name.endswith("attention_head_results") else [name])
        ]
        shape = (len(labels), len(read))
        metrics = torch.full(shape, bench.base)
        flips = torch.zeros(2, *shape, dtype=torch.int64)
        todo = [(column, _reader(name, self.num_layers), name) for column, name in enumerate(read)]
        with tqdm(total=len(labels) * len(read), desc="paths", disable=not progress) as bar:
            for column, depth, name in sorted(todo, key=lambda item: item[1]):
                reached = [i for i, label in enumerate(labels) if _component(label) <= depth]
                for begin in range(0, len(reached), batch):
                    part = reached[begin : begin + batch]
                    changes = [_difference(own, other, labels[i]).to(weights.device) for i in part]
                    scale = [weights[:, :, depth, _component(labels[i]), None] for i in part]
                    moved = torch.cat([a * change for a, change in zip(scale, changes, strict=True)])
                    hooks = [(name, lambda value, hook, moved=moved: value + moved.to(value.device))]
                    found = bench.measure(depth // 2, hooks, len(part))
                    metrics[part, column] = torch.tensor(found[0])
                    flips[0, part, column], flips[1, part, column] = found[1], found[2]
                bar.update(len(labels))
        axes = {"senders": labels, "receivers": read}
        return Effects(axes, metrics, flips[0], flips[1], bench.base, bench.other)

    def _parts_of_paths(self, names, allowed: Sequence[str], what: str) -> list[str]:
        chosen = [n for n in self.match_names(names) if self.hook_dict[n].layer not in self.skipped]
        for name in chosen:
            if name.rsplit(".", 1)[-1] not in allowed:
                raise ValueError(f"path_patch: {name} is no {what}; expected names of {', '.join(allowed)}")
        return chosen


def _over_widths(effect: Tensor, point: HookPoint, heads: int) -> tuple[Tensor, str]:
    """Summed over widths, with the axes that are left."""
    words = point.axes.split()
    if "N*D" in words:
        effect = effect.unflatten(words.index("N*D"), (heads, -1))
        words = [w for word in words for w in (("N", "D") if word == "N*D" else (word,))]
    summed = [i for i, word in enumerate(words) if word in SUMMED]
    left = " ".join(word for word in words if word not in SUMMED)
    return (effect.sum(summed) if summed else effect), left


def _read_weights(own: ActivationCache) -> Tensor:
    """[b s 2L+1 1+2L]: of each component in what each sublayer reads, and last in the readout."""
    residual = own.residual
    matrix, readout = residual.read_matrix(), residual.write_coefficients()
    return torch.cat((matrix, readout.unsqueeze(2)), dim=2)


def _reader(name: str, layers: int) -> int:
    """Number of the sublayer that reads; the readout comes after all."""
    if name == "readout":
        return 2 * layers
    return 2 * int(name.split(".")[1]) + name.endswith("mlp_collapsed")


def _component(label: str | tuple[str, int]) -> int:
    """Number of the component that a sender belongs to: 0 is the embedding."""
    name = label[0] if isinstance(label, tuple) else label
    site = SENDERS[name.rsplit(".", 1)[-1]]
    return 0 if site is None else 1 + 2 * int(name.split(".")[1]) + (site == "mlp")


def _difference(own: ActivationCache, other: ActivationCache, label) -> Tensor:
    """[b s hidden] float32: how the sender's output differs."""
    name, head = label if isinstance(label, tuple) else (label, None)
    change = wide(other[name]) - wide(own[name])
    return change if head is None else change[:, :, head]
