import itertools

import pytest

from trainstep.accounting.sizes import parse_bytes, sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1M", 10**6),
        ("1m", 10**6),
        ("1MB", 10**6),
        ("1MiB", 2**20),
        ("1Mi", 2**20),
        ("1.5K", 1500),
        ("0.5KiB", 512),
        ("512", 512),
        ("7B", 7),
        ("1GB", 10**9),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_read_as_documented(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "0.0MB",
        "-1",
        "+1",
        "",
        " ",
        "1X",
        "1 MB",
        "MB",
        "1iB",
        "1Bi",
        "1.5",
        "1.0005K",
        "1e6",
        "1_000",
        "٣",
        ".5K",
    ],
)
def test_bad_sizes_are_named(text):
    with pytest.raises(ValueError) as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


def test_ranges_stop_at_the_largest():
    assert list(sizes(10**6, 10**9, 10)) == [10**6, 10**7, 10**8, 10**9]
    assert list(sizes(3, 20, 2)) == [3, 6, 12]
    assert list(sizes(5, 5, 2)) == [5]


def test_a_small_factor_neither_repeats_nor_stalls():
    values = list(sizes(1, 10, 1.5))
    assert values == sorted(set(values))
    assert values[0] == 1
    assert values[-1] <= 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 5, 2), "smallest size 10 is above the largest 5"),
        ((1, 10, 1), "above 1, got 1"),
        ((1, 10, 0.5), "above 1"),
        ((1, 10, float("nan")), "above 1"),
        ((0, 10, 2), "at least one byte"),
    ],
)
def test_bad_ranges_are_refused_at_the_call(arguments, message):
    with pytest.raises(ValueError, match=message):
        sizes(*arguments)


def test_the_generator_is_lazy():
    assert list(itertools.islice(sizes(1, 10**30, 2), 3)) == [1, 2, 4]
