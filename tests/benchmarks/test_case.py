"""Ids: one case, one string, the same everywhere and readable back."""

import pytest

from benchmarks.cases import AREAS, every_case, prepare, select
from benchmarks.cases.case import Case, parse_id


def test_an_id_has_a_fixed_key_order():
    one = Case(area="attention", target="triton", phase="forward", dtype="bf16",
               shape={"mask": "causal", "H": 64, "S": 16384, "B": 1, "K": 16, "T": 16384, "N": 16})  # fmt: skip
    assert one.id == "attention/triton/forward/B1,N16,K16,S16384,T16384,H64,causal,bf16,w1"


def test_every_id_is_distinct_and_reads_back():
    cases = every_case()
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        parsed = parse_id(case.id)
        assert (parsed["area"], parsed["target"], parsed["phase"]) == (case.area, case.target, case.phase)
        assert (parsed["dtype"], parsed["world_size"]) == (case.dtype, case.world_size)
        assert {key: parsed[key] for key in case.shape} == dict(case.shape)


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/B1,fp32", "a/b/c/fp32,wx"])
def test_what_is_no_id_is_named(text):
    with pytest.raises(ValueError, match="not a case id"):
        parse_id(text)


def test_tiers_grow():
    sizes = [len(select(tier=tier)) for tier in ("smoke", "standard", "full")]
    assert 0 < sizes[0] < sizes[1] < sizes[2]


def test_selection_refuses_what_it_does_not_know():
    for arguments, value in (
        ({"tier": "huge"}, "huge"),
        ({"area": "nothing"}, "nothing"),
        ({"only": "("}, r"\("),
    ):
        with pytest.raises(ValueError, match=value):
            select(**arguments)


def test_a_target_that_an_older_trainstep_lacks_is_not_available(monkeypatch):
    def older(case, device):
        import trainstep.nothing_here  # noqa: F401

    monkeypatch.setattr(AREAS["attention"], "prepare", older)
    case = select(tier="smoke", area="attention")[0]
    monkeypatch.setattr("benchmarks.cases.measures_own_tree", lambda: False)
    with pytest.raises(NotImplementedError, match=r"trainstep\.nothing_here"):
        prepare(case, "cpu")
    # In one's own tree it is a misspelt target, which nobody wants to see skipped.
    monkeypatch.setattr("benchmarks.cases.measures_own_tree", lambda: True)
    with pytest.raises(ModuleNotFoundError):
        prepare(case, "cpu")


def test_a_fault_inside_the_measured_code_is_no_missing_target(monkeypatch):
    def broken(case, device):
        import no_such_library  # noqa: F401

    monkeypatch.setattr(AREAS["attention"], "prepare", broken)
    with pytest.raises(ModuleNotFoundError):
        prepare(select(tier="smoke", area="attention")[0], "cpu")
