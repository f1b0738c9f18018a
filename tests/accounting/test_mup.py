import pytest

from trainstep.accounting.mup import setting, table


def factors(parametrisation, kind):
    made = setting(parametrisation, kind, width=1024, base_width=256)
    return made.std_factor, made.learning_rate_factor


def test_the_published_table():
    assert factors("mup", "embedding") == (1.0, 1.0)
    assert factors("mup", "hidden") == (0.5, 0.25)
    assert factors("mup", "output") == (0.25, 0.25)
    assert factors("mup", "gain") == (1.0, 1.0)


def test_the_standard_one_keeps_one_learning_rate():
    for kind, std in (("embedding", 1.0), ("hidden", 0.5), ("output", 0.5), ("gain", 1.0)):
        assert factors("standard", kind) == (std, 1.0)


def test_rows_for_a_report():
    rows = table("mup", widths=(256, 512), base_width=256)
    assert len(rows) == 8
    assert {"layer": "output", "width": 512, "initial std": 0.5, "learning rate": 0.5}.items() <= rows[
        5
    ].items()
    assert all(row["initial std"] == row["learning rate"] == 1.0 for row in rows if row["width"] == 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ntk", "hidden", 1, 1), "unknown parametrisation 'ntk'"),
        (("mup", "bias", 1, 1), "unknown kind of layer 'bias'"),
        (("mup", "hidden", 0, 1), "at least 1, got 0"),
    ],
)
def test_bad_questions(arguments, message):
    parametrisation, kind, width, base = arguments
    with pytest.raises(ValueError, match=message):
        setting(parametrisation, kind, width=width, base_width=base)
