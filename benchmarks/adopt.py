"""File rows that were measured where git does not travel under the commit whose trees hash equal."""

from dataclasses import replace
from pathlib import Path

from benchmarks.history import first_parent, trees
from benchmarks.measure.provenance import committed_tree_sha256
from benchmarks.measure.record import (
    RESULTS,
    Row,
    check_machine,
    check_published,
    destination,
    file_at,
    read_rows,
    safe_name,
    to_line,
    write_atomically,
)


class Trees:
    """The hashes of `src/` and `benchmarks/` of every first-parent ancestor of HEAD.

    Raises:
        ValueError: `root` is no git repository.
    """

    def __init__(self, root: Path) -> None:
        commits = first_parent(root)
        ids = trees(root, commits)
        hashes = {tree: committed_tree_sha256(root, tree) for pair in ids for tree in pair if tree}
        #: commit -> (source_sha256, ruler_sha256), oldest first; None for a tree the commit lacks.
        self.by_commit = {
            commit: (hashes.get(source or ""), hashes.get(ruler or ""))
            for commit, (source, ruler) in zip(commits, ids, strict=True)
        }

    def commit_of(self, row: Row) -> str | None:
        """The commit a row belongs to.

        Of several commits with equal trees (one changed only a text file, or a change was reverted) it is the
        oldest: it stays the same when further such commits come, so adopting twice files once, and a slowdown
        is not blamed on a commit that touched no code. The gate, asked for any of them, finds the rows there.

        A row may say itself which commit's source it measured with another ruler (`run --source --commit`):
        then the source must hash as that commit's and the ruler as any commit's.
        """
        wanted = (row.source_sha256, row.ruler_sha256)
        for commit, found in self.by_commit.items():
            if found == wanted:
                return commit
        said = self.by_commit.get(row.commit or "")
        known_ruler = any(ruler == row.ruler_sha256 for _, ruler in self.by_commit.values())
        if said is not None and said[0] == row.source_sha256 and known_ruler:
            return row.commit
        return None


def adopt(file: Path, *, root: Path, machine: str | None = None, results: Path = RESULTS) -> list[Path]:
    """File the rows of `file` under their commits, `dirty` False.

    Rows go to `results/records/<machine>/<commit>/`, or to `results/local/` when neither `machine` nor the
    rows name one. Adopting a file again, or after its run was resumed, changes nothing else.

    Args:
        file: JSON lines written by `run --out`, `profile` or `precision`.
        root: the repository.
        machine: name for rows measured without one.

    Returns:
        The files the rows are in now.

    Raises:
        ValueError: the file is damaged or empty, a row's trees are no commit's, the rows are of another
            machine, a row that is to be published has too few samples, or the place holds other rows. Nothing
            was written.
    """
    if not file_at(file).exists():
        raise ValueError(f"no file {file}")
    try:
        rows = read_rows(file)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error})") from None
    if not rows:
        raise ValueError(f"{file} holds no rows")
    if machine is not None:
        check_machine(machine)
    trees = Trees(root)
    filed: dict[Path, list[Row]] = {}
    for row in rows:
        commit = trees.commit_of(row)
        if commit is None:
            raise ValueError(
                f"{file}: no commit of HEAD's first-parent history has the trees"
                f" {row.source_sha256[:12]} (src) and {row.ruler_sha256[:12]} (benchmarks)"
                f" that {row.case} was measured with"
            )
        name = row.machine
        if machine is not None:
            if name not in ("local", machine):
                raise ValueError(f"{file}: measured on {name!r}, not on {machine!r}")
            name = machine
        if name != "local":
            check_published(row)
        place = (
            destination(None if name == "local" else name, commit, results) / f"{safe_name(row.run)}.jsonl"
        )
        filed.setdefault(place, []).append(replace(row, machine=name, commit=commit, dirty=False))
    texts = {place: "".join(map(to_line, found)) for place, found in filed.items()}
    for place, text in texts.items():
        # A resumed run has grown; anything else that differs is another run under the same name.
        if file_at(place).exists() and not text.startswith(place.read_text(encoding="utf-8")):
            raise ValueError(f"{place} holds other rows; move it away, or give the run another id")
    for place, text in texts.items():
        write_atomically(place, text)
    return list(texts)
