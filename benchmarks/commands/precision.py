"""`precision`: what accumulation loses, and which dtypes autocast chooses."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.cases.case import Case
from benchmarks.commands.measuring import Device

if TYPE_CHECKING:
    from trainstep.precision.autocast import Dtypes


def precision(
    preset: Annotated[str, typer.Argument(help="Model preset whose dtypes are probed beside the toy model's.")] = "toy",
    dtype: Annotated[str, typer.Option(help="Lower dtypes of autocast, fp16 or bf16, separated by commas.")] = "fp16,bf16",
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Directory of the rows.")] = Path("results/local/precision"),
) -> int:  # fmt: skip
    """The four accumulation experiments, and a probe of every dtype of a step under autocast.

    What was seen stays as rows, which the page shows and `adopt` files.
    """
    import torch

    from benchmarks.commands.measuring import choose_device, writable
    from benchmarks.commands.printing import print_frame
    from benchmarks.commands.studies import Study
    from benchmarks.report.facts import facts_of
    from benchmarks.report.study_tables import dtypes, sums
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
    writable(out)
    with torch.device(device):
        results = {e.name: _metric(accumulate(e), lesson=e.lesson) for e in EXPERIMENTS}
    study = Study("precision", device, out)
    row = study.add(
        Case(area="precision", target="accumulation", phase="sum", shape={}, dtype="mixed"), results
    )
    print_frame("1000 additions of 0.01", sums([facts_of(row)]))
    tokens = torch.zeros(1, config.context_length, dtype=torch.long, device=device)
    targets = torch.zeros(4, dtype=torch.long, device=device)
    block = {"preset": preset, "B": 1, "S": config.context_length, "L": 1}
    models: list[tuple[dict[str, Any], torch.nn.Module, torch.Tensor, torch.Tensor]] = [
        ({"preset": "fc1-relu-ln-fc2"}, ToyModel(8, 5), torch.ones(4, 8, device=device), targets),
        (block, TransformerLM(config), tokens, tokens),
    ]
    rows = []
    for name in names:
        lower = torch.float16 if name == "fp16" else torch.bfloat16
        for shape, model, inputs, wanted in models:

            def loss(logits: torch.Tensor, wanted: torch.Tensor = wanted) -> torch.Tensor:
                return cross_entropy(logits, wanted)

            tensors = _tensors(probe(model.to(device), inputs, loss=loss, dtype=lower))
            case = Case(
                area="precision", target="autocast", phase="forward_backward", shape=shape, dtype=name
            )
            rows.append(study.add(case, {"dtypes": _metric(len(tensors), tensors=tensors)}))
    print_frame(f"Dtypes under autocast on {device}", dtypes([facts_of(row) for row in rows]))
    print(f"{len(rows) + 1} rows in {study.path}")
    return 0


def _metric(value: float, **more: Any) -> dict[str, Any]:
    return {"value": value, "unit": "1", "better": None, **more}


def _tensors(seen: "Dtypes") -> list[dict[str, str]]:
    """A line for each module's outputs, one for all parameters, one for all gradients, and the loss."""
    lines = [
        {"what": "output", "of": path or "(model)", "dtype": ", ".join(found)}
        for path, found in seen.outputs.items()
    ]
    for what, by_name in (("parameters", seen.parameters), ("gradients", seen.gradients)):
        found = ", ".join(sorted(set(by_name.values())))
        lines.append({"what": what, "of": f"all {len(by_name)}", "dtype": found})
    return [*lines, {"what": "loss", "of": "", "dtype": seen.loss}]
