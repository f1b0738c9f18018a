"""The coordinate check of the maximal-update parametrisation: how far a few steps move activations, by width.

Models of growing width (more heads of one width, everything else alike) take the same few AdamW steps on the
same tokens. Under muP each activation moves equally far at every width; under the standard parametrisation it
moves the farther the wider the model, which is why learning rates do not carry over (Yang et al. 2022,
appendix D).
"""

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from trainstep.model.transformer import TransformerLM
    from trainstep.specs.model import ModelConfig

HEAD_DIM = 16
WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """How far one activation moved.

    Attributes:
        parametrisation: "mup" or "standard".
        width: D of the model.
        activation: "embedding", "block 0", ..., "logits".
        rms: root mean square of its change after the steps, over tokens and coordinates.
    """

    parametrisation: str
    width: int
    activation: str
    rms: float


def kind_of(name: str) -> str:
    """Kind of layer, a key of `trainstep.accounting.mup.MUP`, of a parameter of `TransformerLM` by its name."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("head."):
        return "output"
    return "gain" if "norm" in name else "hidden"


def small_model(width: int) -> "ModelConfig":
    """Two blocks of a width, the head width fixed.

    Raises:
        ValueError: the width is no multiple of the head width.
    """
    from trainstep.specs.model import ModelConfig

    if width < HEAD_DIM or width % HEAD_DIM:
        raise ValueError(f"widths must be multiples of the head width {HEAD_DIM}, got {width}")
    return ModelConfig(
        name=f"width-{width}",
        d_model=width,
        d_ff=4 * width,
        n_layers=2,
        n_heads=width // HEAD_DIM,
        vocab_size=64,
        context_length=32,
        batch_size=4,
    )


def prepare_model(parametrisation: str, width: int, *, base_width: int, seed: int) -> "TransformerLM":
    """A model whose weights start as its constructor draws them at the base width, scaled to its own.

    The output projection starts at zero in both parametrisations (Yang et al. 2022, appendix D.2): what the
    random start adds to the logits' change fades with width and would hide the part that does not.

    Raises:
        ValueError: an unknown parametrisation, or a width that is no multiple of the head width.
    """
    import torch

    from trainstep.accounting.mup import setting
    from trainstep.model.transformer import TransformerLM

    config, base = small_model(width), small_model(base_width)
    torch.manual_seed(seed)
    model = TransformerLM(config)
    shapes = {name: p.shape for name, p in TransformerLM(base, device="meta").named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            made = setting(parametrisation, kind_of(name), width=width, base_width=base_width)
            if made.kind == "output":
                weight.zero_()
            elif made.kind == "hidden":
                # The constructor's variance is 2 / (inputs + outputs), at this width and at the base width.
                drawn, at_base = 2 / sum(weight.shape), 2 / sum(shapes[name])
                weight.mul_((at_base / drawn) ** 0.5 * made.std_factor)
    return model


def parameter_groups(
    model: "TransformerLM", parametrisation: str, *, base_width: int, learning_rate: float
) -> list[dict[str, object]]:
    """Groups for an optimizer of Adam's kin: one for each kind of layer, with its learning rate."""
    from trainstep.accounting.mup import MUP, setting

    width = model.config.d_model
    groups = []
    for kind in MUP:
        made = setting(parametrisation, kind, width=width, base_width=base_width)
        held = [p for name, p in model.named_parameters() if kind_of(name) == kind]
        groups.append({"params": held, "lr": learning_rate * made.learning_rate_factor})
    return groups


def activations(model: "TransformerLM", tokens: "Tensor") -> dict[str, "Tensor"]:
    """Outputs of the embedding, of every block and of the head for tokens [B, S]."""
    import torch

    with torch.no_grad():
        x = model.embedding(tokens)
        seen = {"embedding": x}
        for index, block in enumerate(model.blocks):
            x = block(x)
            seen[f"block {index}"] = x
        seen["logits"] = model.head(model.norm(x))
    return seen


def coordinate_check(
    parametrisation: str,
    *,
    widths: tuple[int, ...] = WIDTHS,
    steps: int = 4,
    learning_rate: float = 0.005,
    seeds: int = 1,
) -> list[Moved]:
    """Train a model of each width for a few steps and say how far its activations moved.

    Args:
        parametrisation: "mup" or "standard".
        widths: the first is the base width, where both parametrisations are the same.
        steps, learning_rate: AdamW's, without weight decay; the learning rate is the base width's.
        seeds: runs whose squared changes are averaged.

    Raises:
        ValueError: an unknown parametrisation, a width that is no multiple of the head width, no widths or
            seeds.
    """
    import torch

    from trainstep.model.adamw import AdamW
    from trainstep.model.loss import cross_entropy

    if not widths or seeds < 1:
        raise ValueError("a coordinate check needs at least one width and one seed")
    moved = []
    for width in widths:
        squares: dict[str, float] = {}
        for seed in range(seeds):
            model = prepare_model(parametrisation, width, base_width=widths[0], seed=seed)
            draw = torch.Generator().manual_seed(seed)
            shape = (model.config.batch_size, model.config.context_length + 1)
            tokens = torch.randint(model.config.vocab_size, shape, generator=draw)
            before = activations(model, tokens[:, :-1])
            groups = parameter_groups(
                model, parametrisation, base_width=widths[0], learning_rate=learning_rate
            )
            optimizer = AdamW(groups, weight_decay=0.0)
            for _ in range(steps):
                optimizer.zero_grad()
                cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
                optimizer.step()
            for name, now in activations(model, tokens[:, :-1]).items():
                change = float((now - before[name]).square().mean())
                squares[name] = squares.get(name, 0.0) + change / seeds
        moved += [
            Moved(parametrisation=parametrisation, width=width, activation=name, rms=square**0.5)
            for name, square in squares.items()
        ]
    return moved


def slopes(moved: list[Moved]) -> dict[str, float]:
    """Power of the width with which each activation's change grows: 0 is flat.

    Least squares through log(rms) against log(width).
    """
    found = {}
    for name in dict.fromkeys(row.activation for row in moved):
        points = [(log(row.width), log(row.rms)) for row in moved if row.activation == name]
        x = sum(p[0] for p in points) / len(points)
        y = sum(p[1] for p in points) / len(points)
        across = sum((p[0] - x) ** 2 for p in points)
        found[name] = sum((p[0] - x) * (p[1] - y) for p in points) / across if across else 0.0
    return found
