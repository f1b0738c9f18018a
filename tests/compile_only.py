"""Kernels through Triton's compiler where there is no GPU: a driver that only says which GPU it would be."""

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class NoDevice:
    """A Hopper GPU as far as the compiler asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class CompileOnly:
    """A kernel whose launch compiles it and hands what was built to `report(kernel, built)`."""

    def __init__(self, kernel, report):
        self.kernel, self.report = kernel, report

    def __getitem__(self, grid):
        def compile(*arguments, **options):
            self.report(self.kernel, self.kernel.warmup(*arguments, grid=grid, **options))

        return compile


def for_hopper():
    """From here on this process compiles for a Hopper GPU."""
    driver.set_active(NoDevice())
