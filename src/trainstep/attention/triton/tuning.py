"""Which tile shape a kernel uses: a literal table for known devices, a short search with a cache for others.

Order of look-up: `TABLE` (shipped), this process's memory, the cache file, the search. The search times at
most `len(CANDIDATES)` tiles and stops at `SEARCH_SECONDS`; its winner goes to the cache file, so that later
processes start at once. Nothing is searched in Triton's interpreter or while a CUDA graph is being captured.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trainstep.interpreter import interpreted

# For one kernel; the first use of a shape meets three, and the compiler takes up to 4.5 s for a tile of float32. 12 s took 27 in all.
SEARCH_SECONDS = 2.5


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of one program's work and how it is compiled.

    Attributes:
        queries: rows of the score tile.
        keys: columns of the score tile.
        warps: warps a program.
        stages: depth of the software pipeline of loads.
    """

    queries: int
    keys: int
    warps: int
    stages: int


def _tile(queries: int, keys: int, warps: int, stages: int) -> Tile:
    return Tile(queries=queries, keys=keys, warps=warps, stages=stages)


INTERPRETER_TILE = _tile(128, 64, 4, 1)  # an interpreted program costs milliseconds whatever its size
DELTA_TILE = _tile(64, 0, 4, 1)  # D = rowsum(O * dO) is limited by memory; its tile hardly matters

# How matrix products are taken: 16-bit tensor cores, TF32 tensor cores, or float32 multiply-adds.
HALF, TF32, FLOAT32 = "half", "tf32", "fp32"

# kernel, capability, padded head width, kind of product.
Key = tuple[str, tuple[int, int], int, str]

H100 = (9, 0)  # H100, H200
TABLE: dict[Key, Tile] = {
    ("forward", H100, 16, HALF): _tile(64, 64, 4, 3),
    ("forward", H100, 32, HALF): _tile(64, 64, 4, 3),
    ("forward", H100, 64, HALF): _tile(64, 128, 4, 3),
    ("forward", H100, 128, HALF): _tile(64, 64, 4, 3),
    ("forward", H100, 256, HALF): _tile(128, 32, 8, 2),
    ("dq", H100, 16, HALF): _tile(64, 64, 4, 3),
    ("dq", H100, 32, HALF): _tile(64, 64, 4, 3),
    ("dq", H100, 64, HALF): _tile(64, 64, 4, 3),
    ("dq", H100, 128, HALF): _tile(128, 64, 8, 3),
    ("dq", H100, 256, HALF): _tile(128, 32, 8, 2),
    ("dkdv", H100, 16, HALF): _tile(64, 64, 4, 2),
    ("dkdv", H100, 32, HALF): _tile(64, 64, 4, 2),
    ("dkdv", H100, 64, HALF): _tile(64, 64, 4, 2),
    ("dkdv", H100, 128, HALF): _tile(64, 64, 4, 2),
    ("dkdv", H100, 256, HALF): _tile(32, 64, 8, 1),
    ("forward", H100, 16, TF32): _tile(128, 64, 8, 2),
    ("forward", H100, 32, TF32): _tile(128, 64, 8, 2),
    ("forward", H100, 64, TF32): _tile(128, 64, 8, 2),
    ("forward", H100, 128, TF32): _tile(64, 32, 4, 2),
    ("forward", H100, 256, TF32): _tile(64, 32, 8, 1),
    ("dq", H100, 16, TF32): _tile(64, 64, 4, 2),
    ("dq", H100, 32, TF32): _tile(64, 64, 4, 2),
    ("dq", H100, 64, TF32): _tile(64, 32, 4, 2),
    ("dq", H100, 128, TF32): _tile(64, 32, 8, 2),
    ("dq", H100, 256, TF32): _tile(32, 32, 8, 1),
    ("dkdv", H100, 16, TF32): _tile(64, 64, 4, 2),
    ("dkdv", H100, 32, TF32): _tile(64, 64, 4, 2),
    ("dkdv", H100, 64, TF32): _tile(32, 64, 4, 2),
    ("dkdv", H100, 128, TF32): _tile(32, 64, 8, 1),
    ("dkdv", H100, 256, TF32): _tile(32, 32, 8, 1),
    # Multiply-adds are unrolled: larger tiles spill registers and take the compiler half a minute.
    ("forward", H100, 16, FLOAT32): _tile(64, 32, 4, 2),
    ("forward", H100, 32, FLOAT32): _tile(64, 32, 4, 2),
    ("forward", H100, 64, FLOAT32): _tile(64, 32, 8, 2),
    ("forward", H100, 128, FLOAT32): _tile(32, 32, 8, 2),
    ("forward", H100, 256, FLOAT32): _tile(16, 32, 8, 1),
    ("dq", H100, 16, FLOAT32): _tile(32, 32, 4, 2),
    ("dq", H100, 32, FLOAT32): _tile(32, 32, 4, 2),
    ("dq", H100, 64, FLOAT32): _tile(32, 32, 4, 2),
    ("dq", H100, 128, FLOAT32): _tile(32, 32, 8, 2),
    ("dq", H100, 256, FLOAT32): _tile(16, 32, 8, 1),
    ("dkdv", H100, 16, FLOAT32): _tile(32, 32, 4, 2),
    ("dkdv", H100, 32, FLOAT32): _tile(32, 32, 4, 2),
    ("dkdv", H100, 64, FLOAT32): _tile(32, 32, 4, 2),
    ("dkdv", H100, 128, FLOAT32): _tile(32, 32, 8, 1),
    ("dkdv", H100, 256, FLOAT32): _tile(32, 16, 8, 1),
}

# Tried in this order, by padded head width (up to and including); the first of each fits every device.
CANDIDATES: dict[tuple[int, str], tuple[Tile, ...]] = {
    (64, HALF): (_tile(64, 64, 4, 2), _tile(128, 64, 4, 2), _tile(64, 128, 8, 2), _tile(128, 128, 8, 2)),
    (128, HALF): (_tile(64, 32, 4, 2), _tile(64, 64, 4, 2), _tile(128, 64, 8, 2), _tile(64, 128, 8, 2)),
    (256, HALF): (_tile(32, 32, 4, 1), _tile(64, 32, 4, 2), _tile(64, 64, 8, 2)),
    (64, TF32): (_tile(32, 32, 4, 2), _tile(64, 32, 4, 2), _tile(64, 64, 8, 2)),
    (128, TF32): (_tile(32, 32, 4, 1), _tile(64, 32, 8, 2), _tile(64, 64, 8, 1)),
    (256, TF32): (_tile(16, 16, 4, 1), _tile(32, 16, 4, 1), _tile(32, 32, 8, 1)),
    (64, FLOAT32): (_tile(32, 32, 4, 2), _tile(64, 32, 8, 2)),
    (128, FLOAT32): (_tile(32, 32, 8, 1), _tile(32, 16, 4, 1)),
    (256, FLOAT32): (_tile(16, 16, 4, 1),),
}

_chosen: dict[str, Tile] = {}


def cache_file() -> Path:
    """Where winners of the search are kept: $TRAINSTEP_CACHE_DIR, else the user's cache directory."""
    root = os.environ.get("TRAINSTEP_CACHE_DIR")
    folder = (
        Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trainstep"
    )
    return folder / "attention_tiles.json"


def padded_width(width: int) -> int:
    """Columns of a tile that holds a head of this width: the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def kind_of(dtype: torch.dtype, tf32: bool) -> str:
    """How products of this dtype are taken."""
    if dtype.itemsize == 2:
        return HALF
    return TF32 if tf32 else FLOAT32


def candidates(width: int, kind: str) -> tuple[Tile, ...]:
    """Tiles to try on a device without a row in `TABLE`."""
    bucket = next(limit for limit in (64, 128, 256) if padded_width(width) <= limit)
    return CANDIDATES[(bucket, kind)]


def choose(kernel: str, width: int, kind: str, run: Callable[[Tile], object]) -> Tile:
    """The tile for a kernel on the current device; `run` launches it with a given tile, for the search."""
    if interpreted():
        return INTERPRETER_TILE
    key: Key = (kernel, torch.cuda.get_device_capability(), padded_width(width), kind)
    shipped = TABLE.get(key)
    if shipped is not None:
        return shipped
    text = f"{kernel} {torch.cuda.get_device_name()} H{key[2]} {kind}"
    if text not in _chosen:
        stored = _read_cache().get(text)
        if stored is not None:
            _chosen[text] = stored
        elif torch.cuda.is_current_stream_capturing():
            return candidates(width, kind)[0]
        else:
            _chosen[text] = search(candidates(width, kind), run, _time_on_device)
            _write_cache(text, _chosen[text])
    return _chosen[text]


def search(
    tiles: tuple[Tile, ...],
    run: Callable[[Tile], object],
    seconds: Callable[[Callable[[], object]], float],
    limit_seconds: float = SEARCH_SECONDS,
) -> Tile:
    """The fastest of `tiles`, judged by `seconds`; no new tile is started after `limit_seconds`.

    Raises:
        RuntimeError: no tile could be launched; carries the last reason.
    """
    started = time.perf_counter()
    best: tuple[float, Tile] | None = None
    reason: Exception | None = None
    for tile in tiles:
        if best is not None and time.perf_counter() - started > limit_seconds:
            break
        try:
            taken = seconds(lambda tile=tile: run(tile))  # type: ignore[misc]
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's OutOfResources: this device's shared memory is too small
            reason = error
            continue
        if best is None or taken < best[0]:
            best = (taken, tile)
    if best is None:
        raise RuntimeError(f"no tile shape could be launched: {reason}")
    return best[1]


def _time_on_device(run: Callable[[], object]) -> float:
    run()  # compiles
    torch.cuda.synchronize()
    samples = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return min(samples)


def _read_cache() -> dict[str, Tile]:
    """The cache file's winners; a missing or damaged file is an empty one and is written anew."""
    try:
        stored = json.loads(cache_file().read_text())
        return {name: Tile(**tile) for name, tile in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_cache(name: str, tile: Tile) -> None:
    """Add a winner. Written to a file beside and renamed, so that a reader never sees half a file."""
    path = cache_file()
    tiles = {**_read_cache(), name: tile}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({key: asdict(value) for key, value in tiles.items()}, indent=1))
        beside.replace(path)
    except OSError:
        pass  # a read-only home costs the next process a search, nothing else
