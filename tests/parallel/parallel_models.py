"""Small models and the one-process reference that the parallel tests compare with."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from training_budget import Path

from trainstep.parallel.launch import rank_device
from trainstep.parallel.registry import DATA_PARALLEL, get_data_parallel, load_data_parallel

ALL = [row.name for row in DATA_PARALLEL]
OURS = [row.name for row in DATA_PARALLEL if row.unused_parameters]


def wrap(name, module, **options):
    """A registry row's wrapper around a module."""
    return load_data_parallel(get_data_parallel(name))(module, **options)


def one_by_one(function, names):
    """Run a check for each variant in one call; its values by name."""
    return {name: function(name) for name in names}


class Toy(nn.Module):
    """Tied embedding and head, odd widths, a frozen layer, a parameter that nothing uses, mixed shapes."""

    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.second = nn.Linear(7, width, bias=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        """Logits of the next token."""
        x = self.embedding(tokens)
        x = x + self.second(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        return self.head(x * self.scale)


class Uneven(nn.Module):
    """Case F1: no size divides by the ranks; one weight of one element; a scalar; a layer used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(101, 7)
        self.twice = nn.Linear(7, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.down = nn.Linear(7, 1)
        self.tiny = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(7, 101)

    def forward(self, tokens):
        """Logits of the next token."""
        x = self.embedding(tokens)
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) * self.scale
        return self.head(x + self.tiny(self.down(x)))


class Single(nn.Module):
    """Case Z3: one parameter, so that all ranks but one own nothing."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)

    def forward(self, tokens):
        """Logits of the next token."""
        return torch.tanh(self.embedding(tokens)) @ self.embedding.weight.T


def loss_of(model, tokens):
    """Mean cross-entropy of the next token, in float32 at least."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def batch_of(rank, step, micro=0, rows=4, vocabulary=11):
    """Rank `rank`'s tokens [rows, 6] of one micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, vocabulary, (rows, 6), generator=generator).to(rank_device())


def build(seed=0, make=Toy):
    """A seeded model on this rank's device."""
    torch.manual_seed(seed)
    return make().to(rank_device())


def reference_gradients(model, batches_of_ranks):
    """One process: each rank's accumulated gradients, added in rank order and divided."""
    totals = {}
    for batches in batches_of_ranks:
        model.zero_grad()
        for tokens in batches:
            loss_of(model, tokens).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals[name] + parameter.grad if name in totals else parameter.grad.clone()
    for name, parameter in model.named_parameters():
        parameter.grad = totals[name] / len(batches_of_ranks) if name in totals else None


def clip_reference(parameters, max_norm):
    """Clipping by the global norm, the norm in float64."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sum(g.double().square().sum() for g in gradients).sqrt().to(gradients[0].dtype)
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def reference_step(model, step, micro_batches=1, each_reduced=False):
    """Leave the gradients of one step of all ranks on the model, as one process computes them.

    `each_reduced`: the mean over ranks is taken for each micro-batch and these are added; else each rank adds
    up its micro-batches first.
    """
    size = dist.get_world_size()
    if not each_reduced:
        reference_gradients(
            model, [[batch_of(rank, step, micro) for micro in range(micro_batches)] for rank in range(size)]
        )
        return
    totals = {}
    for micro in range(micro_batches):
        reference_gradients(model, [[batch_of(rank, step, micro)] for rank in range(size)])
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals[name] + parameter.grad if name in totals else parameter.grad
    for name, parameter in model.named_parameters():
        parameter.grad = totals.get(name)


def reference_training(model, make_optimizer, steps, micro_batches=1):
    """Train a copy of `model` in this one process as all ranks together would: its path."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    path = Path(model)
    for step in range(steps):
        reference_step(model, step, micro_batches)
        optimizer.step()
        path.advance()
    return path.finish()


def adamw(model):
    """AdamW without fused kernels, on what is trainable."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, foreach=False)


def momentum(model):
    """SGD with momentum."""
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, foreach=False
    )


def values_of(model):
    """Parameters by name, tied ones by each name."""
    return {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


def bit_equal(one, other):
    """Whether two dictionaries hold the same tensors; NaN equals nothing."""
    return one.keys() == other.keys() and all(torch.equal(one[n].cpu(), other[n].cpu()) for n in one)


def fingerprint(module):
    """All parameters and buffers as bytes, to compare ranks bit for bit."""
    return [
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for t in (*module.parameters(), *module.buffers())
    ]
