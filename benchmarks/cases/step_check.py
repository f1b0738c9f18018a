"""Whether a way of running the training step computes it: losses and updates beside `plain` in float64."""

from functools import cache
from typing import Any

from benchmarks.cases import step as table
from benchmarks.cases.case import Check

CHECK_BATCHES = 16


def packed(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights of separate projections, as the packed ones of `fused_projections` hold them."""
    import torch

    result = {}
    for name, value in weights.items():
        if ".query." in name:
            parts = [weights[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
            result[name.replace(".query.", ".query_key_value.")] = torch.cat(parts)
        elif name.endswith(".gate.weight"):
            parts = [weights[name.replace(".gate.", f".{part}.")] for part in ("gate", "up")]
            result[name.replace(".gate.", ".gate_up.")] = torch.cat(parts)
        elif not any(f".{part}." in name for part in ("key", "value", "up")):
            result[name] = value
    return result


def _weights(step: table.Step) -> dict[str, Any]:
    """What the optimizer moves, by name: the float32 master where there is one."""
    optimizers = getattr(step.optimizer, "optimizers", (step.optimizer,))
    masters = {
        p: state["master"] for one in optimizers for p, state in one.state.items() if "master" in state
    }
    return {name: masters.get(p, p).detach() for name, p in step.model.named_parameters()}


def _load_weights(step: table.Step, weights: dict[str, Any]) -> None:
    """Into the model and the masters; packed where the row's projections are."""
    import torch

    given = packed(weights) if step.row.fused_projections else weights
    with torch.no_grad():
        for held in (_weights(step), dict(step.model.named_parameters())):
            for name, tensor in held.items():
                tensor.copy_(given[name])


def _train(step: table.Step) -> None:
    """Some training steps on one batch, the last of which is the captured one where the row has a graph."""
    if step.row.cuda_graph:
        return step.capture("train_step")()
    for _ in range(table.CAPTURE_WARMUPS + 1):
        step.reset_gradients()
        for _, part in step.parts("train_step"):
            part()


@cache
def check(target: str, dtype_name: str, device: str) -> Check:
    """Losses and training steps of the target beside `plain` in float64 on a two-layer model with the same seed.

    Budgets follow what `plain` itself loses in the target's precision. Several batches: one loss, a mean over
    tokens, is now and then right by luck, and nothing could be compared with that. AdamW takes an epsilon of 1 here:
    with a small one its update is the gradient's sign, at first, whatever factor the gradient is wrong by. What each
    tensor moved is divided by the root mean square of what it should have moved, so that all of them count alike.
    """
    import torch

    from benchmarks.measure.error_budget import (
        GRADIENT_FACTOR,
        OUTPUT_FACTOR,
        budget,
        largest_error,
        largest_share,
    )
    from trainstep.specs.model import get_model

    config = get_model("toy", context_length=64, d_model=128, vocab_size=1000)

    def make(target: str, dtype: str) -> table.Step:
        step = table.Step(table.ROWS[target], config, dtype, device, lr=0.1, eps=1.0)
        if step.scaler:  # so that no step overflows and is skipped
            step.scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
        return step

    def results(step: table.Step) -> tuple[Any, dict[str, Any]]:
        _load_weights(step, weights)
        before = {name: weight.to(torch.float64, copy=True) for name, weight in _weights(step).items()}
        losses = []
        for seed in range(CHECK_BATCHES):
            step.draw(seed)
            step.forward()
            losses.append(step.loss.detach())
            step.loss = None
        _train(step)
        moved = {name: weight.double() - before[name] for name, weight in _weights(step).items()}
        return torch.stack(losses), moved

    oracle = make("plain", "fp64")
    weights = {name: weight.clone() for name, weight in _weights(oracle).items()}
    loss, moved = results(oracle)
    near_loss, near_moved = results(make("plain", dtype_name))
    got_loss, got_moved = results(make(target, dtype_name))
    if table.ROWS[target].fused_projections:
        moved, near_moved, weights = packed(moved), packed(near_moved), packed(weights)
    sizes = {name: float(move.square().mean().sqrt()) for name, move in moved.items()}

    def alike(moves: dict[str, Any]) -> Any:
        return torch.cat([moves[name].double().flatten() / size for name, size in sizes.items()])

    compared = (
        (got_loss, near_loss, loss, OUTPUT_FACTOR, loss),
        (alike(got_moved), alike(near_moved), alike(moved), GRADIENT_FACTOR, alike(weights)),
    )
    return largest_share(
        largest_error(got, exact) / budget(near, exact, factor, terms)
        for got, near, exact, factor, terms in compared
    )
