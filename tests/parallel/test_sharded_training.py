"""Every row of the sharding table trains alike, and holds what the accounting says."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainstep.model.transformer import TransformerLM
from trainstep.parallel.communication import CommunicationLog
from trainstep.parallel.launch import rank_device
from trainstep.parallel.memory import bytes_by_phase, predicted_by_phase
from trainstep.parallel.registry import SHARDED, get_sharded, load_sharded
from trainstep.specs.model import get_model

NAMES = [row.name for row in SHARDED]
OURS = [row.name for row in SHARDED if not row.peer]


def config():
    """The toy preset with short sequences."""
    return get_model("toy", context_length=16)


def model():
    """A seeded model on this rank's device."""
    torch.manual_seed(0)
    return TransformerLM(config(), device=rank_device())


def loss_of(training, step=0):
    """Mean cross-entropy of this rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(10_000, (2, 17), generator=generator).to(rank_device())
    logits = training.model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(name, optimizer_cls, **options):
    """A row's training of the toy model."""
    return load_sharded(get_sharded(name))(model(), optimizer_cls, lr=0.1, foreach=False, **options)


def train(name, clip):
    """Three clipped steps: the parameters, the norms, and what the log of communication says."""
    log = CommunicationLog(rank_device())
    training = build(name, torch.optim.SGD, momentum=0.9, communication=log)
    norms = []
    for step in range(3):
        training.optimizer.zero_grad()
        log.reset()
        loss_of(training, step).backward()
        training.finish()
        if clip:
            norms.append(training.clip(0.5).item())
        training.optimizer.step()
    times = log.read()
    parameters = {n: p.cpu() for n, p in training.full_parameters().items()}
    return parameters, norms, (times.total_seconds, times.exposed_seconds, times.hidden_share)


def train_all(clip):
    """All rows beside the one that shards nothing."""
    expected, wanted, _ = train("replicated", clip)
    report = {}
    for name in NAMES:
        parameters, norms, times = train(name, clip)
        assert parameters.keys() == expected.keys(), name
        difference = max((parameters[n] - expected[n]).abs().max().item() for n in expected)
        report[name] = difference, norms == pytest.approx(wanted, rel=1e-3) or (norms, wanted), times
    return report


@pytest.mark.parametrize("clip", [False, True])
def test_every_row_trains_alike(ranks, clip):
    for report in ranks.run(train_all, clip):
        for name, (difference, same_norms, (total, exposed, hidden)) in report.items():
            if name in OURS and not clip:
                assert difference == 0, name
            assert difference < 1e-6, name
            assert same_norms is True, (name, same_norms)
            assert total > 0, name
            if exposed is not None:
                assert exposed > 0 and 0 <= hidden <= 1, name


def bytes_of_rows():
    """What each row holds, by phase and component."""
    found = {}
    for name in NAMES:
        training = build(name, torch.optim.AdamW)
        found[name] = bytes_by_phase(training, lambda training=training: loss_of(training).backward())
    return found


def test_bytes_are_as_predicted(ranks):
    per_rank = ranks.run(bytes_of_rows)
    for name in NAMES:
        predicted = predicted_by_phase(config(), "fp32", zero_stage=get_sharded(name).stage, ranks=2)
        for phase, parts in predicted.items():
            for part, expected in parts.items():
                held = [rank[name][phase][part] for rank in per_rank]
                where = (name, phase, part, expected, held)
                assert (expected == 0) == (max(held) == 0), where
                assert held == [pytest.approx(expected, rel=0.05)] * 2, where


def test_a_compute_dtype_needs_sharded_parameters():
    for name in ("replicated", "zero1", "zero2", "torch-zero1"):
        with pytest.raises(ValueError, match="use autocast"):
            load_sharded(get_sharded(name))(nn.Linear(1, 1), torch.optim.SGD, compute_dtype=torch.bfloat16)


def test_unknown_rows_are_named():
    with pytest.raises(ValueError, match="unknown sharding 'zero3'; known: replicated, zero1"):
        get_sharded("zero3")
