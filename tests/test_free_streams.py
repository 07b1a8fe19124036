"""Streams that nobody else holds are written over, block after block; whoever holds some finds them as they were."""

import pytest
import torch

from dsv4 import Dsv4
from dsv4.hyper_connection import HyperConnection
from dsv4.testing import fault_config, random_ids


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model(monkeypatch):
    # Every length counts as long.
    monkeypatch.setattr("dsv4.model.CHUNK", 1)
    monkeypatch.setattr("dsv4.kernels.hyper_connection.CHUNK", 1)
    return Dsv4.from_config(fault_config(), seed=4).requires_grad_(False)


@pytest.fixture
def ids(model):
    return random_ids(model.config, 2, 19, seed=1)


def test_a_run_is_the_same_over_streams_of_its_own(model, ids, monkeypatch):
    seen, write = [], HyperConnection.write

    def noted(self, x, *rest, is_free=False):
        written = write(self, x, *rest, is_free=is_free)
        seen.append((is_free, written.data_ptr() == x.data_ptr()))
        return written

    monkeypatch.setattr(HyperConnection, "write", noted)
    found = model(ids)
    # All but what the first block is given.
    assert seen == [(False, False), *[(True, True)] * (2 * model.num_layers - 1)]
    monkeypatch.undo()
    torch.testing.assert_close(found, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["layers.1.layer_output", "layers.2.layer_input", "layers.1.layer_mid"])
def test_what_a_hook_holds_stays(model, ids, name):
    held, copies = [], []

    def keep(value, hook):
        held.append(value)
        copies.append(value.clone())

    expected = model(ids)
    found = model.run_with_hooks(ids, fwd_hooks=[(name, keep)])
    assert torch.equal(held[0], copies[0])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("before", [False, True])
def test_what_a_module_hook_holds_stays(model, ids, before):
    held, copies = [], []

    def keep(module, args, *output):
        held.append(args[0] if before else output[0])
        copies.append(held[-1].clone())

    block = model.layers[2]
    handle = block.register_forward_pre_hook(keep) if before else block.register_forward_hook(keep)
    model(ids)
    handle.remove()
    assert torch.equal(held[0], copies[0])


def test_what_is_given_stays(model, ids):
    embeddings = model.embed_tokens(ids)
    streams = model(ids, stop_at_layer=2)
    for given, how in ((embeddings, {"inputs_embeds": embeddings}), (streams, {"start_at_layer": 2})):
        before = given.clone()
        model(None if "inputs_embeds" in how else given, input_ids=ids, **how)
        assert torch.equal(given, before)


def test_captures_stay_and_say_what_a_run_with_gradients_says(model, ids):
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, "**.layer_*")
    with torch.enable_grad():
        _, recorded = model.requires_grad_(True).run_with_cache(ids, "**.layer_*")
    for name, value in cache.items():
        torch.testing.assert_close(value, recorded[name], rtol=1e-5, atol=1e-5)
