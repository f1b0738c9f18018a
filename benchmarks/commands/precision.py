"""`precision`: what accumulation loses, and which dtypes autocast chooses."""

from typing import Annotated

import typer

from benchmarks.commands.measuring import Device


def precision(
    preset: Annotated[str, typer.Argument(help="Model preset whose dtypes are probed beside the toy model's.")] = "toy",
    dtype: Annotated[str, typer.Option(help="Lower dtypes of autocast, fp16 or bf16, separated by commas.")] = "fp16,bf16",
    device: Device = "auto",
) -> int:  # fmt: skip
    """The four accumulation experiments, and a probe of every dtype of a step under autocast."""
    import pandas
    import torch

    from benchmarks.commands.measuring import choose_device
    from benchmarks.commands.printing import print_frame
    from trainstep.model.loss import cross_entropy
    from trainstep.model.transformer import TransformerLM
    from trainstep.precision.accumulation import EXPERIMENTS, accumulate
    from trainstep.precision.autocast import ToyModel, probe
    from trainstep.specs.model import get_model

    # Dtypes follow from the operations, not from sizes: one block and a short context show them all.
    config = get_model(preset, n_layers=1, batch_size=1, context_length=16)
    names = [name.strip() for name in dtype.split(",")]
    for name in names:
        if name not in ("fp16", "bf16"):
            raise ValueError(f"unknown dtype {name!r} for autocast; known: fp16, bf16")
    device = choose_device(device)
    print_frame(
        "1000 additions of 0.01",
        pandas.DataFrame(
            [{"sum": e.name, "result": f"{accumulate(e):.4f}", "lesson": e.lesson} for e in EXPERIMENTS]
        ),
    )
    tokens = torch.zeros(1, config.context_length, dtype=torch.long, device=device)
    targets = torch.zeros(4, dtype=torch.long, device=device)
    models = {
        "fc1-relu-ln-fc2": (ToyModel(8, 5), torch.ones(4, 8, device=device), targets),
        f"{preset}, one block": (TransformerLM(config), tokens, tokens),
    }
    for name in names:
        lower = torch.float16 if name == "fp16" else torch.bfloat16
        for title, (model, inputs, wanted) in models.items():

            def loss(logits: torch.Tensor, wanted: torch.Tensor = wanted) -> torch.Tensor:
                return cross_entropy(logits, wanted)

            seen = probe(model.to(device), inputs, loss=loss, dtype=lower)
            lines = [
                {"what": "output", "of": path or "(model)", "dtype": ", ".join(dtypes)}
                for path, dtypes in seen.outputs.items()
            ]
            for what, found in (("parameters", seen.parameters), ("gradients", seen.gradients)):
                lines.append(
                    {"what": what, "of": f"all {len(found)}", "dtype": ", ".join(sorted(set(found.values())))}
                )
            lines.append({"what": "loss", "of": "", "dtype": seen.loss})
            print_frame(f"Dtypes under {name} autocast on {device}: {title}", pandas.DataFrame(lines))
    return 0
