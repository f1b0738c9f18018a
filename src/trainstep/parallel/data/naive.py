"""Data parallelism, naive: after backward, one all-reduce for each parameter, one after the other."""

from trainstep.parallel.data.protocol import DataParallel


class Naive(DataParallel):
    """Waits for each parameter's all-reduce before it starts the next; nothing is hidden, nothing is
    copied."""

    def _reduce_gradients(self) -> None:
        for parameter in self._trainable:
            gradient = self._take(parameter)
            work = self._all_reduce(gradient)
            with self._waiting():
                work.wait()
            self._give(parameter, gradient)
