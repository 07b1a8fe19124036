"""How a model comes to be and goes to disk: from a checkpoint, a config, a transformers model; its text methods.

Mixed into the model. The converter is imported when it is asked for: the model can be read and run without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dsv4 import chat, initialize
from dsv4.config import Dsv4Config
from dsv4.text import Tokenizer


class Loading:
    """Mixed into the model."""

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        device_map: str | Mapping[str, str | int | torch.device] | None = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        experts: str = "resident",
        hot_experts: int | str | None = None,
        layers: int | Sequence[int] | None = None,
        mesh=None,
        weights: str | None = None,
        kernels: str = "auto",
        numerics: str = "exact",
        mtp: bool = False,
        strict_config: bool = True,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool | None = None,
        progress: bool | None = None,
    ) -> Self:
        """Load a checkpoint from a hub id or a local folder (official, hybrid or transformers names).

        Args:
            dtype: of the weights that are not float32 by nature; None takes the config's torch_dtype.
            device: where the model goes; None is the CPU.
            device_map: whole blocks by size, "auto" (GPUs in order, then host memory, then disk) or "balanced" (GPUs about even), or
                {module: device} over embed_tokens, layers.0, ..., hc_head, norm, lm_head; "layers" means all blocks, "" the rest. A block
                on "disk" is read from the checkpoint's files for the length of its forward. docs/scale.md tells what each costs.
            max_memory: {0: "80GB", "cpu": "200GB"}, bytes of weights for device_map="auto" and "balanced"; GPUs not named are left out.
                Default: nine tenths of what is free.
            experts: where routed experts stay: "resident" with their block, "host" or "disk"; from there only those that a batch hits
                are brought to the block's device. Weights that are not resident take no gradient.
            hot_experts: bytes of copies of them kept on each GPU; default half of what the placement leaves free.
            layers: range(0, n) loads the first n blocks; the config says so, and logits read the streams that leave the last of them.
            mesh: a torch DeviceMesh, in every process of a torchrun: dimensions named "pp" (blocks), "ep" (experts), "tp" (heads, groups,
                index heads, shared expert, vocabulary, experts). Each process reads its part of the files. docs/parallel.md.
            weights: "native" keeps FP8 and FP4 codes as stored, "dequantized" decodes them; None is native when the files have codes.
            kernels: "torch", "triton" (an error with the reason where it cannot run), or "auto": Triton on CUDA devices where it
                can run, else torch. Decided for `device` and `dtype` as given here.
            numerics: "exact".
            strict_config: False turns unknown config keys into a warning.
            revision, token, cache_dir, local_files_only: as in huggingface_hub.
            progress: show a bar; None shows it for loads of more than a gigabyte.
        Raises:
            CheckpointError (a ValueError) that lists what is missing, unexpected or wrong, before anything large is read.
        """
        from dsv4 import pretrained

        return pretrained.load(
            cls,
            repo_or_path,
            dtype=dtype,
            device=device,
            weights=weights,
            kernels=kernels,
            numerics=numerics,
            mtp=mtp,
            strict_config=strict_config,
            progress=progress,
            layers=layers,
            mesh=mesh,
            placing={"device_map": device_map, "max_memory": max_memory, "experts": experts, "hot_experts": hot_experts},
            hub={"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only},
        )

    @classmethod
    def from_config(
        cls, config: Dsv4Config, *, seed: int = 0, dtype: torch.dtype | None = None, device=None, kernels: str = "auto", **placing
    ) -> Self:
        """A model of random weights, every parameter non-trivial; the same seed gives the same weights. kernels: as in from_pretrained."""
        from dsv4 import pretrained
        from dsv4.placement import refuse_without_files

        refuse_without_files(placing)
        dtype = dtype or config.torch_dtype
        model = cls(replace(config, torch_dtype=dtype))
        pretrained.use_kernels(model, kernels, device, dtype)
        initialize.fill(model, seed)
        return model.to(device=device, dtype=dtype)

    @classmethod
    def from_transformers(cls, hf_model) -> Self:
        """A model over the weights of a transformers DeepseekV4ForCausalLM (shared where the layouts agree)."""
        from dsv4 import pretrained

        return pretrained.from_transformers(cls, hf_model)

    kernels = "auto"
    # Of a model whose weights are in several places (`dsv4.placed.Placed`).
    placed = None

    def use_kernels(self, kernels: str) -> Self:
        """Choose what computes the fused ways: "auto" (again after each move or cast), "torch", "triton".

        ValueError when "triton" cannot run on this device or in this dtype, with the reason.
        """
        from dsv4 import pretrained

        pretrained.use_kernels(self, kernels, self.device, self.dtype)
        return self

    def _apply(self, fn, recurse=True):
        if self.placed is not None:
            raise ValueError(
                "this model's weights are where device_map= or experts= put them and keep their dtype; to move or cast it, load it again "
                "with other arguments (device_map=, experts=, dtype=)"
            )
        super()._apply(fn, recurse)
        return self.use_kernels("auto") if self.kernels == "auto" else self

    def compare(self, hf_model, input, **run):
        """Error of every value that a transformers model of the same weights shows as well: a printable Table."""
        from dsv4 import pretrained

        return pretrained.compare(self, hf_model, input, **run)

    def save_pretrained(self, folder: str | Path, *, format: str = "official", overwrite: bool = False) -> None:
        """Write the model as a checkpoint: "official" names or "transformers" names. A non-empty folder is refused without overwrite."""
        from dsv4 import pretrained

        pretrained.save(self, folder, format=format, overwrite=overwrite)

    def dequantize(self) -> Self:
        """Decode every FP8 and FP4 weight in place, to the model's dtype."""
        from dsv4 import pretrained

        return pretrained.dequantize(self)

    # Text.

    def to_tokens(self, text: str | list[str], prepend_bos: bool = False) -> Tensor:
        """Text or texts -> ids [b, s] on the model's device, padded at the right; no BOS unless asked."""
        return self.tokenizer.to_tokens(text, prepend_bos=prepend_bos).to(self.device)

    def to_chat_tokens(self, messages: Sequence[chat.Message], thinking: bool = False, *, tools=None, effort=None) -> Tensor:
        """A conversation -> ids [1, s] on the model's device, up to where the answer has to begin (see `dsv4.chat`).

        messages: {"role": "system" | "user" | "assistant", "content": str, "reasoning_content": str}; earlier reasoning is left out.
        tools and effort: NotImplementedError.
        """
        return chat.to_chat_tokens(self.tokenizer, messages, thinking, tools=tools, effort=effort).to(self.device)

    def to_string(self, ids) -> str | list[str]:
        """Ids -> text; a batch gives a list."""
        return self.tokenizer.to_string(ids)

    def to_str_tokens(self, text, prepend_bos: bool = False) -> list[str] | list[list[str]]:
        """Text or ids -> its tokens as strings."""
        return self.tokenizer.to_str_tokens(text, prepend_bos=prepend_bos)

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token; ValueError when it is not."""
        return self.tokenizer.to_single_token(text)

    # State.

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """As in PyTorch, and refuses a hash table of another dtype or with ids outside the experts."""
        for name, tensor in state_dict.items():
            if name.endswith("tid2eid") and (tensor.is_floating_point() or bool(((tensor < 0) | (tensor >= self.num_experts)).any())):
                raise ValueError(f"{name} must hold integers, 0 <= id < {self.num_experts}; got {tensor.dtype}")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


NO_TOKENIZER = Tokenizer(backend=None)
