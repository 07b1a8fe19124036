"""A padded row gives what it gives alone: logits, every value, gradients. Padding is never NaN and
never heard.

The row alone is the truth; transformers contradicts itself here (its compression windows count
from the padding).
"""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import Dsv4
from dsv4.config import CSA, HCA
from dsv4.testing import (
    CHOICES,
    LIMITS,
    agree,
    assert_close,
    fault_config,
    names_of,
    random_config,
    random_ids,
    relative_error,
)

LIMIT = "row alone"
# Values that may hold -inf: what a query cannot see.
MASKED = ("attention_scores", "indexer_scores")


@pytest.fixture(scope="module")
def model() -> Dsv4:
    return Dsv4.from_config(fault_config(), seed=11)


def batch(config, lengths: list[int], width: int, sides: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, mask) [rows, width]: row i has lengths[i] tokens, its padding at the side sides[i]
    ("l" or "r").
    """
    ids = random_ids(config, len(lengths), width, seed)
    mask = torch.zeros_like(ids)
    for row, (tokens, side) in enumerate(zip(lengths, sides, strict=True)):
        mask[row, width - tokens if side == "l" else 0 :][:tokens] = 1
    return ids, mask


def check_rows(model: Dsv4, ids: Tensor, mask: Tensor) -> None:
    """Every row's logits against the row alone. Where they differ, choices must differ by a near
    tie: the tokens before count.
    """
    with torch.no_grad():
        logits = model(ids, attention_mask=mask)
        assert bool(logits.isfinite().all())
        for row in range(len(ids)):
            real = mask[row].bool()
            if not bool(real.any()):
                continue
            alone = ids[row][real][None]
            ours, expected = logits[row, real][None], model(alone)
            if relative_error(ours, expected) > LIMITS[LIMIT].relative:
                clean = clean_tokens(model, ids, mask, row, alone)
                ours, expected = ours[clean], expected[clean]
            assert_close(ours, expected, LIMIT, f"row {row} of {mask.sum(1).tolist()}")


def clean_tokens(model: Dsv4, ids: Tensor, mask: Tensor, row: int, alone: Tensor) -> Tensor:
    names = names_of(model, CHOICES)
    _, padded = model.run_with_cache(ids, names, attention_mask=mask)
    _, solo = model.run_with_cache(alone, names)
    here = {name: value[row : row + 1, mask[row].bool()] for name, value in padded.items()}
    # The batch has entries for its longest row; this row's selection is narrower.
    for name in here:
        if name.endswith("indexer_selection"):
            solo_width, width = solo[name].shape[-1], here[name].shape[-1]
            solo = dict(solo) | {name: pad(solo[name], (0, width - solo_width), value=-1)}
    agreement = agree(
        here,
        {name: solo[name] for name in here if name.endswith(("expert_indices", "indexer_selection"))},
    )
    assert agreement.ties <= 1
    return agreement.clean


@pytest.mark.parametrize("side", "lr")
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 13, 16, 24])
def test_every_number_of_pads(model: Dsv4, tokens: int, side: str):
    for pads in range(1, 17):
        ids, mask = batch(model.config, [tokens], tokens + pads, side, seed=tokens)
        check_rows(model, ids, mask)


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_every_length_and_side(model: Dsv4, seed: int):
    draw = random.Random(seed)
    width = draw.randint(1, 40)
    lengths = [draw.randint(0, width) for _ in range(5)] + [width]
    ids, mask = batch(model.config, lengths, width, "".join(draw.choices("lr", k=6)), seed)
    check_rows(model, ids, mask)


@pytest.mark.parametrize("seed", range(15))
def test_random_configs(seed: int):
    draw = random.Random(1000 + seed)
    config = random_config(draw)
    model = Dsv4.from_config(config, seed=seed)
    width = draw.randint(20, 90)
    ids, mask = batch(config, [draw.randint(1, width) for _ in range(3)], width, "lrl", seed)
    check_rows(model, ids, mask)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_many_random_configs(first: int):
    for seed in range(first, first + 20):
        draw = random.Random(5000 + seed)
        config = random_config(draw)
        model = Dsv4.from_config(config, seed=seed)
        width = draw.randint(20, 200)
        ids, mask = batch(
            config,
            [draw.randint(0, width) for _ in range(4)],
            width,
            "".join(draw.choices("lr", k=4)),
            seed,
        )
        check_rows(model, ids, mask)


def test_long_rows_in_bands(model: Dsv4):
    """Past the length from which the window is computed in banded blocks."""
    ids, mask = batch(model.config, [300, 140, 1, 299], 300, "rlll")
    check_rows(model, ids, mask)


def test_lists_of_unequal_length(model: Dsv4):
    ids = random_ids(model.config, 3, 20)
    rows = [ids[0, :7].tolist(), ids[1, :20].tolist(), ids[2, :1].tolist()]
    logits = model(rows)
    for row, logit in zip(rows, logits, strict=True):
        assert_close(logit[None, : len(row)], model(torch.tensor([row])), LIMIT)


@pytest.mark.parametrize("side", "lr")
def test_every_value_of_real_tokens_and_entries(model: Dsv4, side: str):
    """Values with a token axis and no key axis, at real tokens; entries, of those that the row
    has; attention by key position.
    """
    ids, mask = batch(model.config, [21, 26, 13], 26, side * 3)
    _, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    for row in range(3):
        real = mask[row].bool()
        _, solo = model.run_with_cache(ids[row][real][None], "**")
        for name, value in cache.items():
            axes = model.hook_dict[name].axes.split()
            ours, expected = value[row : row + 1], solo[name]
            if "k" in axes:
                continue
            for axis, letter in enumerate(axes):
                if letter == "s":
                    ours = ours[(slice(None),) * axis + (real,)]
                elif letter in ("e", "e_new"):
                    ours = ours.narrow(axis, 0, expected.shape[axis])
                elif letter == "min(index_topk,e)":
                    assert bool((ours.narrow(axis, expected.shape[axis], ours.shape[axis] - expected.shape[axis]) == -1).all())
                    ours = ours.narrow(axis, 0, expected.shape[axis])
            if ours.is_floating_point():
                assert_close(ours, expected, "watched", f"{name}, row {row}")
            elif name != "attention_mask":
                assert torch.equal(ours, expected), f"{name}, row {row}"
        for i in range(model.num_layers):
            at = f"layers.{i}.self_attn"
            ours = by_position(
                cache[f"{at}.attention_probabilities"][row, :, real],
                cache[f"{at}.attention_key_positions"][row],
            )
            expected = by_position(solo[f"{at}.attention_probabilities"][0], solo[f"{at}.attention_key_positions"][0])
            assert ours.keys() == expected.keys()
            for place in ours:
                assert_close(ours[place], expected[place], LIMIT, f"{at} at {place}")


def by_position(probabilities: Tensor, positions: Tensor) -> dict:
    """[N s k], [k] -> {(position, n-th key of that position): [N s]}; a token's key comes before
    an entry's.
    """
    found: dict = {}
    for column, position in enumerate(positions.tolist()):
        if position < 0:
            assert not bool(probabilities[..., column].any()), "weight on a key that is not there"
            continue
        nth = sum(1 for place, _ in found if place == position)
        found[position, nth] = probabilities[..., column]
    return found


def test_nothing_is_nan_anywhere(model: Dsv4):
    """Rows of padding alone included; infinities only where scores are masked."""
    ids, mask = batch(model.config, [0, 5, 0, 24, 1], 24, "lrrll")
    logits, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    assert bool(logits.isfinite().all())
    for name, value in cache.items():
        if value.is_floating_point():
            assert not bool(value.isnan().any()), name
            if not name.endswith(MASKED):
                assert bool(value.isfinite().all()), name
    assert bool(model(ids, attention_mask=torch.zeros_like(mask)).isfinite().all())


def test_ids_at_padding_do_not_matter(model: Dsv4):
    ids, mask = batch(model.config, [9, 24, 17], 24, "lrl")
    other = torch.where(mask.bool(), ids, (ids + 7) % model.vocab_size)
    real = mask.bool()
    assert_close(model(other, attention_mask=mask)[real], model(ids, attention_mask=mask)[real], LIMIT)


def spoiled(value: Tensor, real: Tensor, filling: float, axis: int = 1) -> Tensor:
    """`filling` at padding; the tokens stand on `axis`."""
    shape = [1] * value.dim()
    shape[0], shape[axis] = real.shape
    return value.masked_fill(~real.view(shape), filling)


@pytest.mark.parametrize("side", "lr")
@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e30])
def test_what_is_given_at_padding_is_never_heard(model: Dsv4, side: str, filling: float):
    """As embeddings or as streams: not even the values at padding follow it."""
    ids, mask = batch(model.config, [9, 24, 17], 24, side * 3)
    real = mask.bool()
    expected = model(ids, attention_mask=mask)[real]
    embeddings = spoiled(model.embed_tokens(ids), real, filling)
    streams = spoiled(model(ids, attention_mask=mask, stop_at_layer=1), real, filling)
    for logits in (
        model(ids, inputs_embeds=embeddings, attention_mask=mask),
        model(streams, input_ids=ids, attention_mask=mask, start_at_layer=1),
    ):
        assert bool(logits.isfinite().all())
        assert_close(logits[real], expected, LIMIT)


@pytest.mark.parametrize("side", "lr")
@pytest.mark.parametrize("filling", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("layers.0.layer_output", 1),
        ("layers.2.layer_output", 1),
        ("layers.1.attention_norm_output", 1),
        ("layers.1.self_attn.attention_keys_unrotated", 2),
    ],
)
def test_what_a_hook_writes_at_padding_is_never_heard(model: Dsv4, side: str, filling: float, name: str, axis: int):
    ids, mask = batch(model.config, [9, 24, 17], 24, side * 3)
    real = mask.bool()
    hooks = [(name, lambda value, hook: spoiled(value, real, filling, axis))]
    edited = model.run_with_hooks(ids, hooks, attention_mask=mask)
    assert_close(edited[real], model(ids, attention_mask=mask)[real], LIMIT)


def test_gradients_are_those_of_the_rows_alone(model: Dsv4):
    ids, mask = batch(model.config, [9, 24, 0, 17], 24, "lrll")
    parameters = dict(model.named_parameters())

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    def loss(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[..., 0].sum()

    padded = gradients(loss(model(ids, attention_mask=mask)[mask.bool()]))
    alone = [gradients(loss(model(row[real.bool()][None]))) for row, real in zip(ids, mask, strict=True) if real.any()]
    for name, gradient in padded.items():
        assert bool(gradient.isfinite().all()), name
        expected = sum(g[name] for g in alone if name in g)
        assert_close(gradient, expected, "watched gradient", name)


def test_gradients_are_finite_when_the_loss_counts_padding(model: Dsv4):
    ids, mask = batch(model.config, [0, 1, 24, 7], 24, "llrl")
    out = model(ids, attention_mask=mask).square().mean()
    for gradient in torch.autograd.grad(out, list(model.parameters()), allow_unused=True):
        assert gradient is None or bool(gradient.isfinite().all())


def test_padding_in_bfloat16_is_finite():
    model = Dsv4.from_config(fault_config(), seed=11, dtype=torch.bfloat16)
    ids, mask = batch(model.config, [0, 1, 24, 7], 24, "llrl")
    _, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    assert not any(bool(value.isnan().any()) for value in cache.values() if value.is_floating_point())


@pytest.mark.parametrize("rates", [{CSA: 1, HCA: 1}, {CSA: 7, HCA: 3}, {CSA: 100, HCA: 128}])
@pytest.mark.parametrize("window", [1, 2, 64])
def test_rates_and_windows(rates: dict, window: int):
    model = Dsv4.from_config(fault_config(compress_rates=rates, sliding_window=window), seed=3)
    ids, mask = batch(model.config, [9, 30, 17, 1], 30, "lrlr")
    check_rows(model, ids, mask)


def test_last_logits_are_of_each_rows_last_token(model: Dsv4):
    ids, mask = batch(model.config, [9, 24, 17], 24, "lrr")
    whole, last = model(ids, attention_mask=mask), model(ids, attention_mask=mask, logits_to_keep=2)
    for row in range(3):
        assert_close(last[row], whole[row][mask[row].bool()][-2:], LIMIT)


def test_forms_of_the_mask(model: Dsv4):
    ids, mask = batch(model.config, [9, 24], 24, "lr")
    expected = model(ids, attention_mask=mask)
    for form in (
        mask.bool(),
        mask.float(),
        mask.int(),
        mask.tolist(),
        mask.bfloat16(),
        mask.t().contiguous().t(),
    ):
        assert torch.equal(model(ids, attention_mask=form), expected)
    assert torch.equal(model(ids), model(ids, attention_mask=torch.ones_like(mask)))
    hole, both = mask.clone(), mask.clone()
    hole[1, 5] = 0
    both[1, [0, 23]] = 0
    additive = torch.zeros(2, 1, 24, 24)
    for wrong in (
        hole,
        both,
        mask * 2,
        mask - 1,
        mask[:, :9],
        mask[:1],
        additive,
        (1.0 - mask.float()) * -1e9,
    ):
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=wrong)
