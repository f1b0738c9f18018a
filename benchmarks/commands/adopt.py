"""`adopt`: file rows measured where git does not travel."""

from pathlib import Path
from typing import Annotated

import typer


def adopt(
    file: Annotated[
        Path, typer.Argument(help="JSON lines written by `run --out`, `profile` or `precision`.")
    ],
    machine: Annotated[
        str | None, typer.Option(help="Name of the machine, where the rows have none.")
    ] = None,
) -> int:
    """File rows under the commit of HEAD's first-parent history whose src/ and benchmarks/ hash equal."""
    from benchmarks.adopt import adopt as file_rows
    from benchmarks.measure.record import RESULTS

    root = Path(__file__).resolve().parents[2]
    for place in file_rows(file, root=root, machine=machine, results=root / RESULTS):
        print(f"filed in {place.relative_to(root)}")
    return 0
