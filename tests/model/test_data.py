"""The memory-mapped token dataset."""

import numpy as np
import pytest
import torch

from trainstep.model.data import TokenDataset


def write(tmp_path, tokens, dtype=np.uint16, name="tokens.bin"):
    path = tmp_path / name
    if path.suffix == ".npy":
        np.save(path, np.asarray(tokens, dtype=dtype))
    else:
        np.asarray(tokens, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_targets_are_the_inputs_one_later(tmp_path, name):
    tokens = (np.arange(100) * 7) % 101
    dataset = TokenDataset(write(tmp_path, tokens, name=name), context_length=8)
    assert isinstance(dataset.tokens, np.memmap)
    inputs, targets = dataset.batch(64, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (64, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    place = {int(token): index for index, token in enumerate(tokens)}
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        start = place[row[0]]
        assert row == tokens[start : start + 8].tolist() and target[-1] == tokens[start + 8]


def test_every_crop_can_be_drawn_and_no_other(tmp_path):
    dataset = TokenDataset(write(tmp_path, range(12)), context_length=8)
    assert len(dataset) == 4
    inputs, targets = dataset.batch(400, torch.Generator().manual_seed(0))
    starts, counts = inputs[:, 0].unique(return_counts=True)
    assert starts.tolist() == [0, 1, 2, 3] and targets.max() == 11
    assert counts.min() > 60  # 100 each expected, five standard errors


def test_generator_decides_the_batch(tmp_path):
    dataset = TokenDataset(write(tmp_path, range(1000)), context_length=4)
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    first = dataset.batch(8, a)[0]
    torch.manual_seed(99)  # the global generator plays no part
    assert torch.equal(first, dataset.batch(8, b)[0])
    second = dataset.batch(8, a)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    drawn = dataset.batch(8)[0]
    torch.manual_seed(5)
    assert torch.equal(drawn, dataset.batch(8)[0])


def test_wide_tokens_and_short_files(tmp_path):
    big = write(tmp_path, [70_000, 151_935, 3], dtype=np.uint32)
    inputs, targets = TokenDataset(big, context_length=2, dtype=np.uint32).batch(1)
    assert inputs.tolist() == [[70_000, 151_935]] and targets.tolist() == [[151_935, 3]]
    with pytest.raises(ValueError, match="holds 3 tokens; a context of 3 and its last target need 4"):
        TokenDataset(big, context_length=3, dtype=np.uint32)
    with pytest.raises(ValueError, match="holds 0 tokens"):
        TokenDataset(write(tmp_path, []), context_length=1)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(OSError, match="missing"):
        TokenDataset(tmp_path / "missing.bin", context_length=2)
    with pytest.raises(ValueError, match="one dimension of integers"):
        TokenDataset(write(tmp_path, np.zeros((4, 4)), name="square.npy"), context_length=2)
    with pytest.raises(ValueError, match="one dimension of integers"):
        TokenDataset(write(tmp_path, np.zeros(9), np.float32, name="real.npy"), context_length=2)
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"odd\.bin holds 5 bytes"):
        TokenDataset(odd, context_length=1)
    with pytest.raises(ValueError, match="context_length must be at least 1"):
        TokenDataset(write(tmp_path, range(9)), context_length=0)


def test_batch_size_is_checked(tmp_path):
    dataset = TokenDataset(write(tmp_path, range(9)), context_length=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        dataset.batch(0)
