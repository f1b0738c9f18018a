"""Save a training run and go on from there."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

FORMAT = "trainstep-checkpoint-1"


def save_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    generators: Mapping[str, torch.Generator] | None = None,
) -> None:
    """Write everything that the next step depends on: parameters, optimizer, step, random states.

    With the same batches a run loaded from the file goes on bit for bit on one device. Random states are
    torch's global CPU one, every CUDA device's if CUDA is in use, and the given generators; Python's and
    numpy's own are not part of it. The file appears whole or not at all: it is written beside its place,
    flushed to the disk and renamed.

    Args:
        path: the file; replaced if it exists.
        model, optimizer: their state dicts are stored.
        step: steps done, where the schedule goes on.
        generators: further generators by name, the data's for example.

    Raises:
        OSError: the directory cannot be written; an earlier file stays as it was.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "generators": {name: generator.get_state() for name, generator in (generators or {}).items()},
        },
    }
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The rename itself is durable only once the directory is.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    generators: Mapping[str, torch.Generator] | None = None,
) -> int:
    """Put a saved run's state into a model, an optimizer and generators made the same way.

    The file is checked against the model before anything is changed. No code in it is executed
    (`weights_only`).

    Args:
        path: written by `save_checkpoint`.
        model, optimizer: of the same shapes and groups as when saved; on any device.
        generators: the same names as when saved.

    Returns:
        Steps done when saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, is no checkpoint, or belongs to another model, optimizer or set of
            generators.
    """
    content = _read(Path(path))
    generators = generators or {}
    saved_generators = content["rng"]["generators"]
    if set(saved_generators) != set(generators):
        raise ValueError(
            f"{path} holds generators {sorted(saved_generators)}, asked for {sorted(generators)}"
        )
    difference = _difference(content["model"], model.state_dict())
    if difference is not None:
        raise ValueError(f"{path} belongs to another model: {difference}")
    try:
        # Before the model: it checks its groups before it changes anything.
        optimizer.load_state_dict(content["optimizer"])
    except ValueError as error:
        raise ValueError(f"{path} belongs to another optimizer: {error}") from error
    model.load_state_dict(content["model"])
    torch.set_rng_state(content["rng"]["cpu"])
    if content["rng"]["cuda"] and torch.cuda.is_available():
        for index, state in enumerate(content["rng"]["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    for name, generator in generators.items():
        generator.set_state(saved_generators[name])
    return content["step"]


def _read(path: Path) -> dict[str, Any]:
    """The file's content on the CPU, refused unless `save_checkpoint` wrote all of it."""
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}")
    with path.open("rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises half a dozen kinds for damaged archives, OSError among them
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path} is damaged or no checkpoint: {reason}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of format {FORMAT}")
    return content


def _difference(saved: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> str | None:
    """The first way in which two state dicts do not fit, in words; None if they do."""
    for name in present:
        if name not in saved:
            return f"{name} is missing"
        if saved[name].shape != present[name].shape:
            return f"{name} is {tuple(saved[name].shape)} there and {tuple(present[name].shape)} here"
    for name in saved:
        if name not in present:
            return f"{name} is not in the model"
    return None
