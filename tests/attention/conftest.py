"""The device that attention tests run on."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU with Triton's interpreter (see tests/conftest.py)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _ieee_float32() -> Iterator[None]:
    """The reference's float32 products are not rounded to TF32, whatever an earlier test left."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
