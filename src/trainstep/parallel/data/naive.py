"""Data parallelism, naive: after backward, one all-reduce for each parameter, one after the other."""

from trainstep.parallel.data.protocol import DataParallel


class Naive(DataParallel):
    """Waits for each parameter's all-reduce before it starts the next; hides nothing, copies nothing."""

    def _reduce_gradients(self) -> None:
        for parameter in self._trainable:
            gradient = self._take(parameter)
            with self._waiting():  # from the launch on: nothing runs beside it
                self._all_reduce(gradient).wait()
            self._give(parameter, gradient)
