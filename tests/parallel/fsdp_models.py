"""Models, groups and optimizers that the tests of FSDP share."""

import torch
import torch.distributed as dist
from parallel_models import Toy, Uneven
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.model.transformer import TransformerLM
from trainstep.parallel.fsdp import FSDP
from trainstep.specs.model import get_model

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "foreach": False}),
}


class Checkpointed(nn.Module):
    """Blocks recomputed in backward."""

    def __init__(self, recompute=True):
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        """Logits of the next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x)


def toy_transformer():
    """The toy preset, tied and with a small vocabulary."""
    return TransformerLM(get_model("toy", vocab_size=11, context_length=6, tie_embeddings=True))


MODELS = {"toy": Toy, "uneven": Uneven, "checkpointed": Checkpointed, "transformer": toy_transformer}


def groups_of(named):
    """Two groups with parameters interleaved."""
    trainable = [p for _, p in named if p.requires_grad]
    return [
        {"params": trainable[::2], "weight_decay": 0.1},
        {"params": trainable[1::2], "weight_decay": 0.0},
    ]


def optimizer_of(model, kind):
    """An optimizer over a model, wrapped or not, with the same groups."""
    optimizer_cls, options = KINDS[kind]
    module = model.module if isinstance(model, FSDP) else model
    return optimizer_cls(groups_of(module.named_parameters()), **options)


def only_shards(fsdp):
    """Whether nothing but shards is left: every weight's memory is this rank's share."""
    for weight in fsdp.weights:
        size = dist.get_world_size()
        assert weight.shard.numel() <= -(-weight.numel // size)
        assert weight.shard.untyped_storage().nbytes() == weight.shard.numel() * weight.shard.element_size()
        assert weight._full is None and weight._arriving is None
        for layer in weight.layers:
            assert "weight" not in layer.__dict__ and layer.weight is weight.shard
    return not fsdp._whole
