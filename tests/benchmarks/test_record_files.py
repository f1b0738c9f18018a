"""Where rows are written: regular files only, one writer each, links followed."""

import os
import re
import stat
import subprocess
import sys

import pytest

from benchmarks.measure import record
from benchmarks.measure.record import RunWriter, load
from tests.benchmarks.rows import row
from tests.benchmarks.test_record import written


@pytest.fixture(params=["pipe", "device", "link to a pipe", "loop", "directory"])
def special(request, tmp_path):
    """What a name can stand for besides a file; nothing that another program uses."""
    path = tmp_path / "rows.jsonl"
    if request.param == "directory":
        path.mkdir()
    elif request.param == "loop":
        path.symlink_to(path)
    elif request.param == "device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # always full
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        target = tmp_path / "pipe" if "link" in request.param else path
        os.mkfifo(target)
        if target != path:
            path.symlink_to(target)
    return path


def test_what_is_no_regular_file_is_neither_read_nor_replaced(special):
    before = os.lstat(special)
    for use in (
        RunWriter.to_file,
        lambda path: RunWriter(path.parent, "rows"),
        lambda path: record.write_atomically(path, "text"),
        record.read_rows,
    ):
        with pytest.raises(ValueError, match=re.escape(str(special))) as caught:
            use(special)
        assert "\n" not in str(caught.value)
    if not special.is_dir():
        (problem,) = load([special])[1]
        assert str(special) in problem
        assert load([special.parent])[0] == []
    assert os.path.samestat(os.lstat(special), before)
    assert len(list(special.parent.iterdir())) <= 2


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_the_file(tmp_path, there):
    target, link = tmp_path / "elsewhere" / "rows.jsonl", tmp_path / "link.jsonl"
    target.parent.mkdir()
    if there:
        target.write_text(record.to_line(row("a/x/p/S1,fp32,w1")))
    link.symlink_to("elsewhere/rows.jsonl")
    writer = RunWriter.to_file(link)
    writer.add(row("a/x/p/S2,fp32,w1"))
    writer.start_over()
    writer.add(row("a/x/p/S3,fp32,w1"))
    writer.close()
    assert link.is_symlink() and len(written(target)) == 1
    record.write_atomically(link, b"text")
    assert link.is_symlink() and target.read_text() == "text"


def test_of_two_writers_of_one_file_the_second_is_refused(tmp_path):
    (tmp_path / "link.jsonl").symlink_to("r.jsonl")
    first = RunWriter(tmp_path, "r")

    def refused():
        for path in (tmp_path / "r.jsonl", tmp_path / "link.jsonl"):
            with pytest.raises(ValueError, match=f"another process is writing {re.escape(str(path))}"):
                RunWriter.to_file(path)

    refused()
    first.add(row("a/x/p/S1,fp32,w1"))  # which puts another file in the place
    refused()
    first.start_over()
    refused()
    first.add(row("a/x/p/S2,fp32,w1"))
    first.close()
    second = RunWriter(tmp_path, "r")
    assert second.done_ids() == {"a/x/p/S2,fp32,w1"}
    second.close()


def test_of_a_run_without_rows_nothing_stays(tmp_path):
    RunWriter(tmp_path, "r").close()
    assert list(tmp_path.iterdir()) == []


def test_processes_that_start_together_lose_no_row(tmp_path):
    """Each adds a row if it may; every row that was added is there. A process that is killed leaves no lock."""
    program = (
        "import sys, time; sys.path.insert(0, '.')\n"
        "from tests.benchmarks.rows import row; from benchmarks.measure.record import RunWriter\n"
        "sys.stdin.readline()\n"
        "while True:\n"
        "    try: writer = RunWriter(sys.argv[1], 'r')\n"
        "    except ValueError: continue\n"
        "    writer.add(row(f'a/x/p/S{sys.argv[2]},fp32,w1'))\n"
        "    print('added', flush=True)\n"
        "    if sys.argv[2] == '0': time.sleep(60)\n"
        "    break\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(4)
    ]  # fmt: skip
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert children[0].stdout.readline() == "added\n"
    children[0].kill()
    for child in children:
        child.communicate(timeout=60)
    assert sorted(s["case"] for s in written(tmp_path / "r.jsonl")) == [
        f"a/x/p/S{i},fp32,w1" for i in range(4)
    ]
