"""Names of checkpointing policies."""

from dataclasses import dataclass

POLICIES = ("none", "every-block", "groups-K", "recursive", "selective", "offload")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A checkpointing policy taken apart.

    Attributes:
        kind: "none", "groups", "recursive", "selective" or "offload".
        group_size: blocks in a segment; 0 unless the kind is "groups".
    """

    kind: str
    group_size: int = 0


def parse_policy(name: str) -> Policy:
    """Read a policy's name.

    Args:
        name: "none"; "every-block" (the same as "groups-1"); "groups-K" with K >= 1 blocks a segment;
            "recursive"; "selective"; "offload".

    Raises:
        ValueError: the name is none of these.
    """
    if name in ("none", "recursive", "selective", "offload"):
        return Policy(kind=name)
    if name == "every-block":
        return Policy(kind="groups", group_size=1)
    size = name.removeprefix("groups-")
    if size != name and size.isdecimal() and int(size) >= 1:
        return Policy(kind="groups", group_size=int(size))
    raise ValueError(
        f"unknown checkpointing policy {name!r}; known: {', '.join(POLICIES)} with a whole number K from 1"
    )
