"""The result of a logit lens: logits per layer, with the readout they were made by, printable as a table of top tokens."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

READOUTS = ("head", "mean", "each", "final_pre")


@dataclass(frozen=True)
class Lens:
    """Attributes:
    readout: how streams became one vector. layers: the layers read.
    logits: [layers, b, (s), (n,) vocab] float32. positions: [b, s] row positions of the tokens read.
    """

    readout: str
    layers: list[int]
    logits: Tensor
    positions: Tensor
    tokenizer: Any = None

    def top(self, k: int = 5) -> tuple[Tensor, Tensor]:
        """(probabilities, token ids) of the k best, [layers, ..., k]."""
        best = self.logits.softmax(-1).topk(min(k, self.logits.shape[-1]), dim=-1)
        return best.values, best.indices

    def words(self, layer: int, k: int = 5) -> list[tuple[str, float]]:
        """The k best tokens of the first row's last real token read at `layer` (of the last stream with readout "each")."""
        logits = self.logits[self.layers.index(layer), 0]
        if self.logits.dim() - (self.readout == "each") == 4:
            real = (self.positions[0] >= 0).nonzero().flatten()
            logits = logits[real[-1] if len(real) else -1]
        logits = logits[-1] if self.readout == "each" else logits
        values, ids = logits.softmax(-1).topk(min(k, logits.shape[-1]))
        return [(self._word(int(i)), float(v)) for v, i in zip(values, ids, strict=True)]

    def _word(self, token: int) -> str:
        known = self.tokenizer is not None and self.tokenizer.is_present
        return self.tokenizer.to_string([token]) if known else str(token)

    def __str__(self) -> str:
        lines = [f'logit lens, readout "{self.readout}", row 0, last token read']
        for layer in self.layers:
            lines.append(f"  layer {layer:3d}  " + "  ".join(f"{w!r} {p:.3f}" for w, p in self.words(layer)))
        return "\n".join(lines)
