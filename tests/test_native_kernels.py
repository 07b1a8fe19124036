"""A small checkpoint kept as stored, FP8 and FP4, computed by device code in Triton's interpreter beside plain torch: logits, values
listened to, gradients, padding, what goes on in an edited run.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4 import Dsv4, Dsv4Config
from dsv4.experts import Experts, Fp4Experts, Fp8Experts
from dsv4.linear import Fp8Linear
from dsv4.moe import SharedExpert
from dsv4.testing import assert_close
from dsv4.testing_checkpoints import Recipe, make_checkpoint
from dsv4.testing_kernels import interpreter

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

SLOT = "layers.1.mlp.expert_outputs"
NEURONS = "layers.0.mlp.mlp_neurons"


@pytest.fixture(scope="module")
def run():
    """Calls a function of this file where Triton interprets."""
    with interpreter(sys.modules[__name__]) as call:
        yield call


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for experts in ("FP8", "FP4"):
        made[experts] = tmp_path_factory.mktemp(experts)
        sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 32, "hc_sinkhorn_iters": 3}
        config = Dsv4Config.tiny(**sizes, layer_types=None, mlp_layer_types=("hash_moe", "moe"))
        make_checkpoint(made[experts], config, Recipe(experts=experts), seed=2)
    return made


def reroute(value: Tensor, hook=None) -> Tensor:
    """Other experts, one of them twice."""
    other = value.flip(-1).clone()
    other[..., 0] = other[..., 1]
    return other


@pytest.mark.parametrize("form", ["FP8", "FP4"])
def test_a_checkpoint_is_saved_and_decoded_as_it_was_stored(folders, form, tmp_path):
    """Codes and scales bit for bit through loading and saving; decoding in place is loading decoded."""
    model = Dsv4.from_pretrained(folders[form], progress=False)
    state = model.state_dict()
    assert {torch.float8_e4m3fn, torch.float8_e8m0fnu} <= {t.dtype for t in state.values()}
    model.save_pretrained(tmp_path / "again")
    again = Dsv4.from_pretrained(tmp_path / "again", progress=False).state_dict()
    assert again.keys() == state.keys()
    for name, t in state.items():
        assert again[name].dtype == t.dtype
        assert torch.equal(again[name].contiguous().view(torch.uint8), t.contiguous().view(torch.uint8)), name
    decoded = Dsv4.from_pretrained(folders[form], weights="dequantized", progress=False).state_dict()
    found = model.dequantize().state_dict()
    assert found.keys() == decoded.keys()
    for name, t in decoded.items():
        assert torch.equal(found[name], t), name


EDITS = {
    "layers.0.mlp.expert_indices": reroute,
    "layers.1.mlp.expert_indices": reroute,
    "layers.1.mlp.expert_weights": lambda value, hook=None: value * 0.5,
}


def results(folder: Path, ids: Tensor, mask: Tensor, kernels: str, form: str) -> dict[str, Tensor]:
    model = Dsv4.from_pretrained(folder, dtype=torch.float32, kernels=kernels, progress=False)
    assert {m.backend for m in model.modules() if isinstance(m, Experts | Fp8Linear | SharedExpert)} == {kernels}
    assert any(isinstance(m, {"FP8": Fp8Experts, "FP4": Fp4Experts}[form]) for m in model.modules())
    assert any(isinstance(m, Fp8Linear) for m in model.modules())
    found = {}
    with torch.no_grad():
        found["logits"] = model(ids, attention_mask=mask)[mask]
        found["watched"], cache = model.run_with_cache(ids, [SLOT, NEURONS], attention_mask=mask)
        found["watched"] = found["watched"][mask]
        found |= {name: cache[name][mask] for name in (SLOT, NEURONS)}
        for name, edit in EDITS.items():
            with model.hooks([(name, edit)]):
                found[f"edited {name}"] = model(ids, attention_mask=mask)[mask]
                if kernels == "torch":
                    with model.hooks([(SLOT, lambda value, hook=None: value)]):
                        found[f"edited and spelled {name}"] = model(ids, attention_mask=mask)[mask]
    model.requires_grad_(False)
    streams = model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=streams, input_ids=ids, attention_mask=mask)[mask]
    weights = torch.linspace(-1.0, 1.0, out.numel()).view(out.shape)
    found["gradient"] = torch.autograd.grad((out * weights).sum(), streams)[0]
    return {name: t.detach() for name, t in found.items()}


@pytest.mark.parametrize("form", ["FP4", pytest.param("FP8", marks=pytest.mark.slow)])
def test_a_checkpoint_kept_as_stored(run, folders, form):
    """Linear maps and the shared expert are FP8 in both; one block routes by hash, one by score; one row is padded."""
    ids = torch.randint(0, 64, (2, 3))
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[0, :2] = False
    here = results(folders[form], ids, mask, "torch", form)
    for name in EDITS:
        spelled = here.pop(f"edited and spelled {name}")
        assert_close(spelled, here[f"edited {name}"], "watched", name)
        assert not torch.allclose(spelled, here["logits"])
    there = run(results, folders[form], ids, mask, "triton", form)
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert_close(there[name], value, "float32 op gradient" if name == "gradient" else "watched", name)


def watched_projection(folder: Path, ids: Tensor) -> list[int]:
    """How often a hook of PyTorch's own on the shared expert's gate was called, and how many values the run without it differs in."""
    model = Dsv4.from_pretrained(folder, dtype=torch.float32, kernels="triton", progress=False)
    calls = []
    with torch.no_grad():
        plain = model(ids)
        handle = model.layers[0].mlp.shared_experts.gate_proj.register_forward_hook(lambda *args: calls.append(1))
        watched = model(ids)
        handle.remove()
    return [len(calls), int((~torch.isclose(plain, watched, rtol=1e-4, atol=1e-5)).sum())]


@pytest.mark.slow
def test_a_hook_on_a_projection_that_is_fused_away_is_called(run, folders):
    assert run(watched_projection, folders["FP4"], torch.randint(0, 64, (1, 3))) == [1, 0]
