"""One weight of n elements cut over N ranks: rank r keeps elements [r*c, (r+1)*c) of the flattened weight, c
= ceil(n/N).

What a rank keeps is never padded (the last ranks may keep fewer elements, or none); padding to c exists only
in the buffers that travel.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.collectives import start_all_gather

Group = dist.ProcessGroup | None


class ShardedWeight:
    """The shard, and the whole weight while it is there.

    Attributes:
        name: of the weight in the wrapped model.
        shard: the parameter that optimizers see, [this rank's elements], in the weight's own dtype; its
            `full_shape` is the weight's.
        shape: of the whole weight.
        layers: modules whose `weight` it is; several when tied.
        unsent: this rank's gradient of backwards in no_sync, whole.
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        layers: list[nn.Module],
        group: Group,
        dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.shape = weight.shape
        self.layers = layers
        self.numel = weight.numel()
        self.dtype = dtype or weight.dtype
        self.unsent: Tensor | None = None
        self._group = group
        self.chunk = -(-self.numel // dist.get_world_size(group))
        self.shard = nn.Parameter(self.cut(weight.detach()).clone(), requires_grad=weight.requires_grad)
        self.shard.full_shape = self.shape  # type: ignore[attr-defined]
        for layer in layers:
            layer._parameters["weight"] = self.shard
        self._full: Tensor | None = None  # [N * c], in the compute dtype
        self._arriving: dist.Work | None = None
        self._leaf: Tensor | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor in the weight's shape: a view where the layout allows."""
        start = dist.get_rank(self._group) * self.chunk
        return whole.reshape(-1)[start : min(start + self.chunk, self.numel)]

    def join(self, part: Tensor) -> Tensor:
        """The whole of what every rank holds a part of, in the weight's shape and the part's dtype."""
        whole, work = self._all_gather(part)
        work.wait()
        return whole[: self.numel].view(self.shape)

    def _all_gather(self, part: Tensor) -> tuple[Tensor, dist.Work]:
        if part.numel() < self.chunk:
            part = torch.cat([part, part.new_zeros(self.chunk - part.numel())])
        whole = part.new_empty(self.chunk * dist.get_world_size(self._group))
        return whole, start_all_gather(whole, part, self._group)

    # The whole weight comes and goes.

    @property
    def storage_pointer(self) -> int:
        """Where the whole weight's memory starts; 0 when there is none."""
        return 0 if self._full is None else self._full.untyped_storage().data_ptr()

    @torch.no_grad()
    def start_gather(self, start: Callable[[Callable[[], dist.Work]], dist.Work]) -> None:
        """Begin to gather the whole weight, cast to the compute dtype first.

        Args:
            start: launches a collective (and notes it).
        """
        assert self._full is None, f"{self.name} is here already"
        part = self.shard.detach().to(self.dtype)

        def launch() -> dist.Work:
            self._full, work = self._all_gather(part)
            return work

        self._arriving = start(launch)

    def wait(self) -> Tensor:
        """The gathered buffer [N * c], once it has arrived."""
        assert self._full is not None, f"{self.name} was not gathered"
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        return self._full

    def use(self, on_gradient: Callable[["ShardedWeight", Tensor], Any]) -> Tensor:
        """The whole weight in its shape, for one forward of a layer; all uses of one forward share one
        autograd leaf.

        Args:
            on_gradient: called with the whole gradient of all those uses when backward has it.
        """
        whole = self.wait()[: self.numel].view(self.shape)
        if not (torch.is_grad_enabled() and self.shard.requires_grad):
            return whole
        if self._leaf is None:
            self._leaf = whole.detach().requires_grad_()

            def complete(leaf: Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                assert gradient is not None
                on_gradient(self, gradient)

            self._leaf.register_post_accumulate_grad_hook(complete)
        else:
            self._leaf.data = whole
        return self._leaf

    def free(self) -> None:
        """Let the whole weight's memory go; waits for a gather under way."""
        if self._full is not None:
            self.wait()
            self._full = None
        if self._leaf is not None:
            # The graph keeps the leaf for its shape; reading it now would give NaN.
            self._leaf.data = self.shard.new_full((1,), float("nan"), dtype=self.dtype).expand(self.shape)

    def drop_leaf(self) -> None:
        """Use a new autograd leaf from now on: the next forward has a graph of its own."""
        self._leaf = None

    # The gradient.

    def keep_unsent(self, gradient: Tensor) -> None:
        """Add a whole gradient that is not to be sent yet, in float32 at least."""
        gradient = gradient.to(torch.promote_types(gradient.dtype, self.shard.dtype))
        self.unsent = gradient if self.unsent is None else self.unsent + gradient

    def take_unsent(self, gradient: Tensor | None) -> Tensor:
        """What is to be sent, with what was kept, as a padded buffer [N * c] in the compute dtype."""
        if self.unsent is not None:
            gradient = self.unsent if gradient is None else self.unsent + gradient
            self.unsent = None
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError("sparse gradients are not sharded; build the embedding with sparse=False")
        flat = gradient.to(self.dtype).contiguous().view(-1)
        padding = self.chunk * dist.get_world_size(self._group) - self.numel
        return torch.cat([flat, flat.new_zeros(padding)]) if padding else flat

    def add_reduced(self, part: Tensor) -> None:
        """Add this rank's part [c] of the reduced gradient to the shard's, in the shard's dtype."""
        part = part[: self.shard.numel()].to(self.shard.dtype, copy=True)  # it may be a view of the whole
        if self.shard.grad is None:
            self.shard.grad = part
        else:
            self.shard.grad += part
