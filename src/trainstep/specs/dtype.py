"""Dtypes by their short names, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DtypeSpec:
    """One way of computing: how its values are stored and how products are taken.

    Attributes:
        name: short name used in case ids and on the command line.
        torch_name: attribute of `torch` that holds the tensors' dtype.
        bytes: bytes a stored element.
        autocast: torch dtype name of the autocast region over float32 parameters, if any.
        tf32: float32 tensors whose matrix products may round their inputs to TF32.
    """

    name: str
    torch_name: str
    bytes: int
    autocast: str | None = None
    tf32: bool = False


DTYPES = {
    spec.name: spec
    for spec in (
        DtypeSpec(name="fp32", torch_name="float32", bytes=4),
        DtypeSpec(name="tf32", torch_name="float32", bytes=4, tf32=True),
        DtypeSpec(name="fp16", torch_name="float16", bytes=2),
        DtypeSpec(name="bf16", torch_name="bfloat16", bytes=2),
        DtypeSpec(name="fp64", torch_name="float64", bytes=8),
        DtypeSpec(name="amp-bf16", torch_name="float32", bytes=4, autocast="bfloat16"),
        DtypeSpec(name="amp-fp16", torch_name="float32", bytes=4, autocast="float16"),
    )
}


def get_dtype(name: str) -> DtypeSpec:
    """Look a dtype up by its short name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]
