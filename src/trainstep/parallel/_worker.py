"""One rank's process: started by path from `launch`, never imported.

It reads its place in the group, initialises the default process group, then runs jobs until told to stop.
Standard library only until the launching process's `sys.path` is in place.
"""

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this rank when the launching process is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the line above
        os._exit(1)


def _describe(error: BaseException) -> dict[str, object]:
    return {
        "ok": False,
        "message": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exc(),
        "at": time.monotonic(),
    }


def main() -> None:
    """Serve the connections whose file descriptors are the arguments: for jobs, and to tell where this rank is."""
    connection, asking = (Connection(int(number)) for number in sys.argv[1:])
    for each in (connection, asking):
        os.set_inheritable(each.fileno(), False)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the launching process decides
    place = pickle.loads(connection.recv_bytes())
    _die_with_parent(place["parent"])
    sys.path[:] = place["sys_path"]

    try:
        import torch.distributed as dist

        from trainstep.parallel import launch, transfer, whereabouts

        whereabouts.answer_from_a_thread(asking)
        launch.initialize(place["rank"], place["world_size"], place["device"], place["rendezvous"])
        dist.barrier()  # also makes the backend's connections, outside of any timed job
    except BaseException as error:
        connection.send_bytes(pickle.dumps(_describe(error)))
        connection.recv_bytes()  # stay until killed: a closed socket would make the other ranks fail first
        return
    connection.send_bytes(pickle.dumps({"ok": True, "value": transfer.dumps(None)}))

    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            break
        if not job:
            break
        try:
            fn, args = transfer.loads(job)
            report = {"ok": True, "value": transfer.dumps(fn(*args))}
            del fn, args
        except BaseException as error:
            report = _describe(error)
        connection.send_bytes(pickle.dumps(report))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly end of the interpreter takes seconds once the compiler is imported


if __name__ == "__main__":
    main()
