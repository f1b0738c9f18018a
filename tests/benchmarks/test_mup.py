"""The coordinate check: flat with muP across 8 times the width, and not flat without."""

import pytest
import torch

from benchmarks.cases.mup import (
    WIDTHS,
    coordinate_check,
    kind_of,
    parameter_groups,
    prepare_model,
    slopes,
)
from trainstep.accounting.mup import MUP


@pytest.fixture(scope="module")
def checked():
    return {name: coordinate_check(name) for name in ("mup", "standard")}


def test_updates_are_flat_with_mup(checked):
    assert WIDTHS[-1] == 8 * WIDTHS[0]
    for activation, slope in slopes(checked["mup"]).items():
        assert abs(slope) < 0.15, activation


def test_updates_grow_without(checked):
    found = slopes(checked["standard"])
    assert all(found[activation] > 0.5 for activation in ("block 0", "block 1", "logits"))


def test_both_are_the_same_at_the_base_width(checked):
    base = [[row.rms for row in rows if row.width == WIDTHS[0]] for rows in checked.values()]
    assert base[0] == base[1]


def test_every_parameter_is_in_one_group():
    model = prepare_model("mup", 64, base_width=32, seed=0)
    groups = parameter_groups(model, "mup", base_width=32, learning_rate=0.1)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert dict(zip(MUP, (group["lr"] for group in groups), strict=True)) == {
        "embedding": 0.1,
        "hidden": 0.05,
        "output": 0.05,
        "gain": 0.1,
    }


def test_hidden_weights_shrink_with_width():
    narrow, wide = (prepare_model("mup", width, base_width=32, seed=0) for width in (32, 128))
    name = "blocks.0.feed_forward.up.weight"
    deviations = [dict(m.named_parameters())[name].std().item() for m in (narrow, wide)]
    assert deviations[1] == pytest.approx(deviations[0] / 2, rel=0.05)
    assert torch.equal(wide.head.weight, torch.zeros_like(wide.head.weight))


def test_kinds_follow_names():
    names = {
        "embedding.weight": "embedding",
        "blocks.0.attention_norm.weight": "gain",
        "blocks.1.attention.query.weight": "hidden",
        "blocks.1.attention.query_norm.weight": "gain",
        "norm.weight": "gain",
        "head.weight": "output",
    }
    assert {name: kind_of(name) for name in names} == names


def test_bad_questions():
    with pytest.raises(ValueError, match="multiples of the head width 16, got 40"):
        coordinate_check("mup", widths=(40,))
    with pytest.raises(ValueError, match="unknown parametrisation 'ntk'"):
        coordinate_check("ntk", widths=(16,))
    with pytest.raises(ValueError, match="at least one width"):
        coordinate_check("mup", widths=())
