"""Update parameters during the backward pass, as soon as their gradients are there."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

# Groups whose gradients may wait for their update before the backward pass waits for it: bounds memory.
GROUPS_IN_FLIGHT = 4


@dataclass(kw_only=True)
class _Group:
    """Parameters that are updated together, and how far the present step is with them."""

    optimizer: Optimizer
    parameters: list[Tensor]
    arrived: set[int] = field(default_factory=set)
    updated: bool = False


class StepInBackward:
    """An optimizer for each group of parameters, stepped by the backward pass itself.

    When the last gradient of a group has been accumulated, the group's optimizer steps and the gradients are
    dropped. So at most a few groups' gradients exist at once instead of all, and on CUDA the updates, which
    are limited by memory bandwidth, run on a stream of their own beside the matrix products of the layers
    below. (PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass"; Lv et
    al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv 2306.09782,
    section 3.1.) The values are those of the same optimizer stepping once after the backward pass, bit for
    bit, where the update of a parameter depends on nothing but its own gradient and state.

        updates = StepInBackward(layers(model), lambda group: torch.optim.AdamW(group, lr=1e-4))
        loss.backward()     # every parameter with a gradient moves
        updates.step()      # what follows on this stream sees all of them

    Both calls may be captured in one CUDA graph if the optimizers may (`capturable=True` in torch's): the
    stream is forked from the backward pass's and joined again by `step`. Forward, backward and `step` must run
    on one stream, from a graph of this step's own (drop the loss of an earlier one). Groups should be as coarse as the
    pieces in which gradients arrive, such as blocks that are compiled apart. Parameters that several groups
    name belong to the first one; those that need no gradient when this is made are left to `step`.

    What it cannot do: clip by the global norm, which is known only after the first updates (`clip_grad_norm`
    refuses), unscale a loss scaled for float16, and sum the gradients of several backward passes, for which
    all but the last must run under `paused()`; a second backward pass before `step` is refused.

    Attributes:
        optimizers: one a group, in order: for state dicts and for learning rates of a schedule.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Tensor]],
        make: Callable[[list[Tensor]], Optimizer],
    ) -> None:
        """Make the optimizers and register a hook on each parameter.

        Args:
            groups: parameters that are updated together.
            make: an optimizer of the parameters it is given.

        Raises:
            ValueError: no parameters, or parameters on several devices.
        """
        self._groups: list[_Group] = []
        seen: set[int] = set()
        for group in groups:
            parameters = [p for p in group if id(p) not in seen and not seen.add(id(p))]  # type: ignore[func-returns-value]
            if parameters:
                self._groups.append(_Group(optimizer=make(parameters), parameters=parameters))
        devices = {p.device for group in self._groups for p in group.parameters}
        if len(devices) != 1:
            raise ValueError(
                f"parameters must be on one device, got {', '.join(sorted(map(str, devices))) or 'none'}"
            )
        (device,) = devices
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._ran_on: set[torch.cuda.Stream] = set()
        self._paused = False
        # The hooks must not keep this object alive: parameters, hooks and optimizers would be a cycle.
        this = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook(this, index))
            for index, group in enumerate(self._groups)
            for parameter in group.parameters
            if parameter.requires_grad
        ]

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """One a group, in order."""
        return tuple(group.optimizer for group in self._groups)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, backward passes only accumulate gradients; the next one outside updates with the sums."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def step(self) -> None:
        """End the step: update what the backward pass left over, and let the current stream wait for all.

        Left over are groups in which some parameter got no gradient (it is left alone, as ever) and gradients
        that came under `paused()` or were set by hand.

        Raises:
            RuntimeError: gradients were accumulated on another stream than this one, whose memory they are.
        """
        for group in self._groups:
            if not group.updated and any(parameter.grad is not None for parameter in group.parameters):
                self._update(group)
        self._join(0)
        if self._stream is not None:
            here = torch.cuda.current_stream(self._stream.device)
            here.wait_stream(self._stream)
            strange, self._ran_on = self._ran_on - {here}, set()
            if strange:
                raise RuntimeError(
                    "gradients were accumulated on another stream than that of step(); run the forward pass on this "
                    "one, and keep no loss of an earlier step"
                )
        for group in self._groups:
            group.arrived.clear()
            group.updated = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients that no update has taken."""
        for group in self._groups:
            group.optimizer.zero_grad(set_to_none)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Refuses: the first gradients are used up before the norm of all is known.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"cannot clip to a global norm of {max_norm}: the update runs during the backward pass, before the norm "
            "of all gradients is known; use an ordinary optimizer"
        )

    def close(self) -> None:
        """Remove the hooks; backward passes leave gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _accumulated(self, group: _Group, parameter: Tensor) -> None:
        """One parameter's gradient is complete."""
        if self._paused:
            return
        if group.updated or id(parameter) in group.arrived:
            raise RuntimeError(
                "a second backward pass before step(): this parameter was updated already, so that gradients cannot "
                "add up; run all but the last backward pass of a step under paused()"
            )
        group.arrived.add(id(parameter))
        if len(group.arrived) == sum(p.requires_grad for p in group.parameters):
            self._update(group)

    def _update(self, group: _Group) -> None:
        gradients = [p.grad for p in group.parameters if p.grad is not None]
        if self._stream is None:
            group.optimizer.step()
        else:
            # Inside a hook the current stream is the one that this parameter was first used on in the forward pass.
            here = torch.cuda.current_stream(self._stream.device)
            self._ran_on.add(here)
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                group.optimizer.step()
                done = torch.cuda.Event()
                done.record()
            self._in_flight.append((done, gradients))
        for parameter in group.parameters:
            parameter.grad = None
        group.updated = True
        self._join(GROUPS_IN_FLIGHT)

    def _join(self, at_most: int) -> None:
        """Let the current stream wait until no more than so many groups are being updated.

        Only then may their gradients go: the allocator gives their memory to what the current stream does
        next. (`record_stream` would do outside of a graph; inside, memory freed that way is not used again.)
        """
        while len(self._in_flight) > at_most:
            done, gradients = self._in_flight.popleft()
            torch.cuda.current_stream(self._stream.device if self._stream else None).wait_event(done)
            gradients.clear()


def _hook(this: "weakref.ref[StepInBackward]", index: int) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        alive = this()
        if alive is not None:
            alive._accumulated(alive._groups[index], parameter)

    return hook


def layers(model: torch.nn.Module) -> Sequence[list[Tensor]]:
    """The parameters of a `TransformerLM` in the pieces in which a backward pass finishes them.

    Returns:
        The embedding's; each block's; those of the final norm and the output projection.
    """
    return [
        list(model.embedding.parameters()),  # type: ignore[operator, union-attr]
        *(list(block.parameters()) for block in model.blocks),  # type: ignore[union-attr]
        [*model.norm.parameters(), *model.head.parameters()],  # type: ignore[operator, union-attr]
    ]
