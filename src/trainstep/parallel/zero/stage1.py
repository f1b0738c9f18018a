"""ZeRO stage 1: every rank keeps the optimizer state of its share of the parameters only.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1.
Gradients and parameters are whole on every rank; after its step a rank broadcasts the parameters it owns.
Optimizer state falls from K bytes an element to K/N on average; a parameter is never split, so no rank holds
more than total/N plus the largest parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.agreement import require_all_ranks
from trainstep.parallel.collectives import broadcast_each


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps any optimizer class whose update of a parameter needs nothing of the others.

    `param_groups` lists all parameters on every rank, and is where schedulers and hand edits change
    hyper-parameters; each step hands them on. `state` holds this rank's share.

    Args:
        params: parameters or groups, as for torch optimizers; the same on every rank.
        optimizer_cls: the optimizer that updates a rank's share.
        group: ranks that share the state; None means all.
        kwargs: the optimizer's hyper-parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self._optimizer_cls = optimizer_cls
        self._kwargs = kwargs
        self._process_group = group
        self._inner: torch.optim.Optimizer | None = None
        # Pairs of a group of all parameters and the inner group of this rank's; none where this rank owns
        # nothing.
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._elements = [0] * dist.get_world_size(group)
        self.owners: dict[Tensor, int] = {}
        # The class fills its defaults in on a stand-in, since some allocate state for whatever they are
        # given.
        params = list(params)
        tensors = _tensors(params)
        like = tensors[0]
        # Over all groups at once: group by group a large parameter of a late one would come on top.
        self._assign(tensors)
        stand_in = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        super().__init__(params, dict(optimizer_cls([stand_in], **kwargs).defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, spread by size over what the ranks own already."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._assign(group["params"])
        own = [p for p in group["params"] if self.owns(p)]
        if not own:
            return
        inner_group = {**_hyper_parameters(group), "params": own}
        if self._inner is None:
            self._inner = self._optimizer_cls([inner_group], **self._kwargs)
            self.state = self._inner.state
        else:
            self._inner.add_param_group(inner_group)
        self._pairs.append((group, self._inner.param_groups[-1]))

    def _assign(self, parameters: list[Tensor]) -> None:
        """Give parameters without an owner, the largest first, to the rank that owns the fewest elements so far."""
        new = [p for p in dict.fromkeys(parameters) if p not in self.owners]
        for parameter in sorted(new, key=lambda p: p.numel(), reverse=True):
            rank = self._elements.index(min(self._elements))
            self._elements[rank] += parameter.numel()
            self.owners[parameter] = rank

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter."""
        return self.owners[parameter] == dist.get_rank(self._process_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's share, then bring every parameter up to date on every rank.

        Args:
            closure: evaluated once, with gradients; its value is returned.
            kwargs: handed to the inner optimizer's step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._inner is not None:
            for group, inner_group in self._pairs:
                inner_group.update(_hyper_parameters(group))
            self._inner.step(**kwargs)
            for group, inner_group in self._pairs:
                group.update(_hyper_parameters(inner_group))  # some optimizers count in their groups
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        broadcast_each(trained, [self.owners[p] for p in trained], self._process_group)
        return loss

    # State dicts, in torch's own format: a plain optimizer loads them, and they load at any number of ranks.

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part; no communication. `merge_state_dicts` joins the parts of all ranks."""
        index_of = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        start, groups = 0, []
        for group in self.param_groups:
            indices = list(range(start, start + len(group["params"])))
            start += len(indices)
            groups.append({**_all_but_parameters(group), "params": indices})
        state = {index_of[p]: dict(values) for p, values in self.state.items()}
        return {"state": state, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters as the plain optimizer would give it, in host memory on every rank.

        Every rank calls it.

        Raises:
            RuntimeError: some ranks did not call it in time.
        """
        require_all_ranks("ShardedOptimizer.state_dict")
        local = self.local_state_dict()
        parts: list[Any] = [None] * dist.get_world_size(self._process_group)
        outline = {i: {k: _outline(v) for k, v in values.items()} for i, values in local["state"].items()}
        dist.all_gather_object(parts, outline, group=self._process_group)
        device = self.param_groups[0]["params"][0].device
        state: dict[int, dict[str, Any]] = {}
        for rank, part in enumerate(parts):
            for index, values in part.items():
                state[index] = {}
                for key, value in values.items():
                    if isinstance(value, _TensorOutline):
                        if rank == dist.get_rank(self._process_group):
                            tensor = local["state"][index][key].to(device, copy=True).contiguous()
                        else:
                            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
                        broadcast_each([tensor], [rank], self._process_group)
                        value = tensor.cpu()
                    state[index][key] = value
        return {"state": dict(sorted(state.items())), "param_groups": local["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a full state, of a plain optimizer or saved at any number of ranks.

        Raises:
            ValueError: the groups do not match.
        """
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved_groups]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer has others")
        saved_index: dict[Tensor, int] = {}
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            saved_index.update(zip(group["params"], saved["params"], strict=True))
            group.update(_all_but_parameters(saved))
        if self._inner is None:
            return
        for group, inner_group in self._pairs:
            inner_group.update(_hyper_parameters(group))
        inner = self._inner.state_dict()
        own = [p for _, inner_group in self._pairs for p in inner_group["params"]]
        inner["state"] = {
            i: state_dict["state"][saved_index[p]]
            for i, p in enumerate(own)
            if saved_index[p] in state_dict["state"]
        }
        self._inner.load_state_dict(inner)
        # Loading replaced the inner groups and state.
        self.state = self._inner.state
        self._pairs = [
            (group, new) for (group, _), new in zip(self._pairs, self._inner.param_groups, strict=True)
        ]


def merge_state_dicts(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the local state dicts of all ranks into a full one, for `ShardedOptimizer.load_state_dict`."""
    parts = list(parts)
    state: dict[int, Any] = {}
    for part in parts:
        state.update(part["state"])
    return {"state": dict(sorted(state.items())), "param_groups": parts[0]["param_groups"]}


class _TensorOutline:
    """Shape and dtype of a tensor that follows by broadcast."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _outline(value: Any) -> Any:
    return _TensorOutline(value) if isinstance(value, Tensor) else value


def _all_but_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a group of all parameters and that of a rank's share have in common; names go with the parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _tensors(params: list[Any]) -> list[Tensor]:
    """Every parameter, in any form torch optimizers take; groups given as generators become lists."""
    found = []
    for entry in params:
        if isinstance(entry, dict):
            if not isinstance(entry["params"], Tensor):
                entry["params"] = list(entry["params"])
            inside = [entry["params"]] if isinstance(entry["params"], Tensor) else entry["params"]
        else:
            inside = [entry]
        found += [parameter[1] if isinstance(parameter, tuple) else parameter for parameter in inside]
    if not found:
        raise ValueError("a sharded optimizer needs at least one parameter")
    return found
