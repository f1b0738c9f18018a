"""Data parallelism, flat: after backward, all gradients in one all-reduce for each dtype."""

from trainstep.parallel.data.protocol import DataParallel, pack, unpack


class Flat(DataParallel):
    """Pays latency once, and a copy of all gradients in memory; nothing is hidden."""

    def _prepare(self) -> None:
        groups: dict[object, list] = {}
        for parameter in self._trainable:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._groups = list(groups.values())

    def _reduce_gradients(self) -> None:
        for group in self._groups:
            flat = pack([self._take(parameter) for parameter in group])
            with self._waiting():  # from the launch on: nothing runs beside it
                self._all_reduce(flat).wait()
            for parameter, reduced in zip(group, unpack(flat, group), strict=True):
                self._give(parameter, reduced)
