"""Fully sharded data parallelism (ZeRO stage 3): when weights are gathered, freed and reduced.

Rajbhandari et al., "ZeRO", section 5.3; Zhao et al., "PyTorch FSDP". Forward: the weights of the first two
layers are gathered; when layer i has finished, its weight is freed and the gather of layer i+2 starts.
Autograd does not keep the weight but a note of it: backward gathers it again, two layers ahead in the order
of the last backward, and when its gradient is complete, reduce-scatters that and frees the weight. "Layer" is
one use of one sharded module.
"""

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainstep.model.embedding import Embedding
from trainstep.model.linear import Linear, PackedLinear
from trainstep.parallel.agreement import require_alike_parameters
from trainstep.parallel.clip import clip_grad_norm
from trainstep.parallel.collectives import broadcast_each, start_reduce_scatter
from trainstep.parallel.data.flat import Flat
from trainstep.parallel.fsdp import state
from trainstep.parallel.fsdp.order import CollectiveOrder
from trainstep.parallel.fsdp.shard import ShardedWeight
from trainstep.parallel.overflow import spread_overflow

SHARDED_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, Linear, PackedLinear, Embedding)
_AHEAD = 2  # gathers ahead of the layer at work; also reductions under way


class FSDP(Flat):
    """The data-parallel protocol with the weights of Linears and Embeddings sharded, the rest replicated.

    Parameters afterwards: a flat shard for each sharded weight (choose optimizer groups by name or by the
    shard's `full_shape`), and the replicated ones as they were. All ranks must run the same layers in the
    same order; finish raises a RuntimeError that names the first difference where they did not (on CUDA on the
    ranks that deviate from the step before). A layer's weight is whole only inside the layer's own forward.
    Several backwards before finish add up.

    A gradient that is not finite on one rank makes one element NaN on every rank, so that a `torch.amp.GradScaler`
    skips the step on all of them and they keep one scale.

    With `compute_dtype` weights are cast before they are gathered and gradients are reduced in it, while
    shards, their gradients and the optimizer's update keep the model's dtype; sharded layers cast their
    inputs and their bias.

    Args:
        module: the model, on this rank's device; rank 0's parameters count.
        compute_dtype: of sharded layers; None computes in the model's.
        layer_classes: further classes to shard: any with a 2-D `weight`.
        mesh: dimensions "replicate" and "shard" over all ranks, see `parallel.mesh`; None shards over all.
        options: see `DataParallel`.

    Raises:
        ValueError: the ranks' models differ, or the model is on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        layer_classes: tuple[type[nn.Module], ...] = (),
        *,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        self.compute_dtype = compute_dtype
        # Set to [] to record (host seconds, what, weight).
        self.events: list[tuple[float, str, str]] | None = None
        self._shard_group = mesh.get_group("shard") if mesh is not None else options.get("group")
        self._replica_group = mesh.get_group("replicate") if mesh is not None else None
        self.weights = self._shard(module, SHARDED_LAYERS + layer_classes, options.get("group"))
        self._by_shard = {id(weight.shard): weight for weight in self.weights}
        self._index = {id(weight): index for index, weight in enumerate(self.weights)}
        super().__init__(module, **options)
        if self._replica_group is not None:
            # The weight is over all ranks, a reduce-scatter's average over a part of them.
            self._averages = False
        for weight in self.weights:
            for layer in weight.layers:
                layer.register_forward_pre_hook(self._enter, with_kwargs=True)
                layer.register_forward_hook(self._leave, always_call=True)
        self._whole: dict[int, ShardedWeight] = {}  # gathered, or on their way
        self._in_forward = False
        self._in_backward = False
        self._forward_order = [w for layer in module.modules() if (w := self._weight_of(layer))]
        self._backward_order: list[ShardedWeight] = []
        self._visited: list[ShardedWeight] = []
        self._flying: deque[tuple[ShardedWeight, Tensor, dist.Work]] = deque()
        self._order = CollectiveOrder([weight.name for weight in self.weights], self._device)

    def _shard(
        self, module: nn.Module, classes: tuple[type[nn.Module], ...], group: dist.ProcessGroup | None
    ) -> list[ShardedWeight]:
        """Cut every weight that only layers of these classes hold; one at a time, from rank 0's."""
        require_alike_parameters(module.named_parameters(), group)
        holders: dict[nn.Parameter, list[tuple[str, str, nn.Module]]] = {}
        for prefix, layer in module.named_modules():
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    holders.setdefault(parameter, []).append((prefix, name, layer))
        weights = []
        for parameter, places in holders.items():
            if parameter.is_meta:
                raise ValueError("build the model on a real device before wrapping it")
            fits = parameter.dim() == 2 and parameter.is_floating_point() and parameter.numel()
            if fits and all(name == "weight" and isinstance(layer, classes) for _, name, layer in places):
                broadcast_each([parameter], [0], group)
                name = f"{places[0][0]}.weight".lstrip(".")
                layers = [layer for _, _, layer in places]
                weights.append(ShardedWeight(name, parameter, layers, self._shard_group, self.compute_dtype))
        return weights

    def _weight_of(self, layer: nn.Module) -> ShardedWeight | None:
        return self._by_shard.get(id(layer._parameters.get("weight")))

    def _managed(self) -> list[nn.Parameter]:
        return [p for p in self._members.parameters() if id(p) not in self._by_shard]

    def _note(self, what: str, weight: ShardedWeight) -> None:
        if self.events is not None:
            self.events.append((time.perf_counter(), what, weight.name))

    def _gather(self, weight: ShardedWeight) -> None:
        if id(weight) not in self._whole:
            self._note("gather", weight)
            self._order.note("gather", self._index[id(weight)])
            weight.start_gather(self._start)
            self._whole[id(weight)] = weight

    def _free(self, weight: ShardedWeight) -> None:
        self._whole.pop(id(weight), None)
        weight.free()

    def _free_all_but(self, needed: list[ShardedWeight]) -> None:
        for weight in list(self._whole.values()):
            if weight not in needed:
                self._free(weight)

    def _forget_graph(self) -> None:
        """Only shards are left, and the next forward starts new autograd leaves."""
        self._free_all_but([])
        for weight in self.weights:
            weight.drop_leaf()

    def _ahead(self, order: list[ShardedWeight]) -> list[ShardedWeight]:
        """What follows the last visited layer in `order`: looked for where it should be, then later."""
        position = len(self._visited) - 1
        if self._visited[-1] not in order[position:]:
            return []
        position = order.index(self._visited[-1], position)
        return order[position + 1 : position + 1 + _AHEAD]

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's part of the batch; only shards are left, also after an exception.

        Raises:
            RuntimeError: a sharded weight was replaced.
        """
        self._notice_parameters()
        for weight in self.weights:
            if any(layer._parameters.get("weight") is not weight.shard for layer in weight.layers):
                raise RuntimeError(f"the sharded weight {weight.name} was replaced; wrap the model again")
        self._forget_graph()  # a backward that failed may have left something
        self._in_forward, self._in_backward, self._visited = True, False, []
        for weight in self._forward_order[:_AHEAD]:
            self._gather(weight)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                output = self.module(*args, **kwargs)
            self._forward_order = self._visited
            return output
        finally:
            self._in_forward, self._visited = False, []
            self._forget_graph()

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a sharded layer's forward: its attribute `weight` becomes the whole weight."""
        weight = self._weight_of(layer)
        assert weight is not None
        if self._in_forward:
            self._visited.append(weight)
        self._gather(weight)
        with self._waiting():
            weight.wait()
        self._note("forward", weight)
        # An instance's own attribute is found before a registered parameter.
        layer.__dict__["weight"] = weight.use(self._gradient_complete)
        if self.compute_dtype is None:
            return None
        for name, parameter in layer._parameters.items():
            if name != "weight" and parameter is not None and parameter.is_floating_point():
                layer.__dict__[name] = parameter.to(self.compute_dtype)
        return tuple(map(self._cast, args)), {name: self._cast(value) for name, value in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if floating else value

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        """After a sharded layer's forward, also a failed one: free its weight, gather two layers on."""
        weight = self._weight_of(layer)
        assert weight is not None
        for name in layer._parameters:
            layer.__dict__.pop(name, None)
        self._note("done", weight)
        if not self._in_forward:  # recomputation inside backward
            self._free(weight)
            weight.drop_leaf()
            return
        ahead = self._ahead(self._forward_order) if self._visited else []
        if weight not in ahead:
            self._free(weight)
        for coming in ahead:
            self._gather(coming)

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a saved tensor: of a whole weight, or a view of it, only a note."""
        pointer = tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
        for weight in self._whole.values():
            if pointer and weight.storage_pointer == pointer:
                return weight, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    # Backward.

    def _unpack(self, kept: Any) -> Tensor:
        """What backward works with: a weight is gathered again, and those that follow start to come."""
        if isinstance(kept, Tensor):
            return kept
        weight, size, stride, offset = kept
        self._begin_backward()
        if not self._visited or self._visited[-1] is not weight:
            self._visited.append(weight)
        ahead = self._ahead(self._backward_order)
        self._free_all_but([weight, *ahead])
        for coming in (weight, *ahead):
            self._gather(coming)
        with self._waiting():
            whole = weight.wait()
        self._note("backward", weight)
        return whole.as_strided(size, stride, offset)

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward, self._visited = True, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_order = self._visited
        self._in_backward, self._visited = False, []
        self._free_all_but([])

    @torch.no_grad()
    def _gradient_complete(self, weight: ShardedWeight, gradient: Tensor) -> None:
        self._begin_backward()
        if not self._visited or weight not in self._ahead(self._backward_order):
            self._free(weight)
        if self._synchronizing:
            self._send(weight, gradient)
        else:
            weight.keep_unsent(gradient)

    def _send(self, weight: ShardedWeight, gradient: Tensor | None) -> None:
        whole = weight.take_unsent(gradient)
        operation = self._weigh(whole)
        self._note("reduce", weight)
        self._order.note("reduce", self._index[id(weight)])
        part = whole

        def launch() -> dist.Work:
            nonlocal part
            part, work = start_reduce_scatter(whole, self._shard_group, operation)
            return work

        work = self._start(launch)
        self._flying.append((weight, part, work))
        if len(self._flying) > _AHEAD:
            self._land()

    def _land(self) -> None:
        weight, part, work = self._flying.popleft()
        with self._waiting():
            work.wait()
            if self._replica_group is not None:
                self._start(lambda: dist.all_reduce(part, group=self._replica_group, async_op=True)).wait()
        weight.add_reduced(part)

    def _reduce_gradients(self) -> None:
        for weight in self.weights:
            if weight.unsent is not None:
                self._send(weight, None)
        while self._flying:
            self._land()
        with self._waiting():
            self._order.require_alike(self._maximum)
        super()._reduce_gradients()
        with self._waiting():
            spread_overflow(
                [weight.shard.grad for weight in self.weights if weight.shard.grad is not None],
                [parameter.grad for parameter in self._trainable if parameter.grad is not None],
                self._device,
                self._maximum,
            )

    # Whole-model views; every rank calls them.

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters, after finish; replicated gradients count once."""
        return clip_grad_norm(
            self._managed(), [weight.shard for weight in self.weights], max_norm, self._shard_group
        )

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the model (tied ones by each name), on this rank's device."""
        return state.full_parameters(self)

    def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The wrapped model's own state dict, whole, in host memory on every rank; see `fsdp.state`."""
        return state.full_state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> Any:  # type: ignore
        """Take this rank's part of a whole state dict: the unwrapped model's, or of any number of ranks."""
        return state.load_full_state_dict(self, state_dict, strict)
