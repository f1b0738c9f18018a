"""The limits against a search over whole numbers of devices that only knows the seconds."""

import pytest

from trainstep.accounting.parallel_limits import Layer, data_limit, mesh_limit, symbolic, tensor_limit

D = 1024  # cancels

# tokens, d_ff, C, W; the last three put an axis of the mesh on its edge.
LAYERS = {
    "both": Layer(tokens=65536, d_ff=16384, flops_per_second=4e14, bytes_per_second=1.8e11),
    "even": Layer(tokens=30000, d_ff=20000, flops_per_second=1e15, bytes_per_second=9e11),
    "many tokens": Layer(tokens=400000, d_ff=2000, flops_per_second=1e15, bytes_per_second=1e11),
    "few tokens": Layer(tokens=60, d_ff=30000, flops_per_second=1e15, bytes_per_second=9e11),
    "slow network": Layer(tokens=50, d_ff=3000, flops_per_second=1e15, bytes_per_second=2e11),
}


def computing(layer, n, backward):
    return (12 if backward else 6) * layer.tokens * D * layer.d_ff / (n * layer.flops_per_second)


def gathering(layer, x, n, backward):
    return (12 if backward else 6) * D * layer.d_ff * (x - 1) / (n * layer.bytes_per_second)


def reducing(layer, y, n):
    return 4 * layer.tokens * D * (y - 1) / (n * layer.bytes_per_second)


def largest(holds):
    """The largest n that holds, where all smaller ones do."""
    n = 1
    while holds(n + 1):
        n += 1
    return n


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("backward", [False, True])
def test_one_axis_equals_a_search(layer, backward):
    slack = 1 + 1e-12
    data = largest(lambda n: gathering(layer, n, n, backward) <= computing(layer, n, backward) * slack)
    assert data == int(data_limit(layer) + 1e-9)
    tensor = largest(lambda n: reducing(layer, n, n) <= computing(layer, n, backward) * slack)
    assert tensor == int(tensor_limit(layer, "backward" if backward else "forward") + 1e-9)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_an_overlapped_mesh_equals_a_search(layer):
    slack = 1 + 1e-12
    x = largest(lambda x: gathering(layer, x, x, False) <= computing(layer, x, False) * slack)
    y = largest(lambda y: reducing(layer, y, x * y) <= computing(layer, x * y, False) * slack)
    mesh = mesh_limit(layer, overlapped=True)
    assert (x, y) == (int(mesh.data + 1e-9), int(mesh.tensor + 1e-9))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_mesh_without_overlap_equals_a_search(layer):
    """Over real axes in fine steps, as a whole number of tensor devices can cost much of a small mesh."""

    def widest(y):
        """Largest real X >= 1 for a Y: communicating grows and computing does not, both times N."""
        low, high = 1.0, 1e7
        if gathering(layer, low, 1, False) + reducing(layer, y, 1) > computing(layer, 1, False):
            return None
        for _ in range(80):
            middle = (low + high) / 2
            if gathering(layer, middle, 1, False) + reducing(layer, y, 1) <= computing(layer, 1, False):
                low = middle
            else:
                high = middle
        return low

    best = (0.0, 0.0, 0.0)
    end = 1 + 1.01 * layer.tensor_ratio
    for i in range(2001):
        y = 1 + (end - 1) * i / 2000
        x = widest(y)
        if x is not None:
            best = max(best, (x * y, x, y))
    mesh = mesh_limit(layer, overlapped=False)
    assert mesh.devices == pytest.approx(best[0], rel=2e-3)
    assert mesh.devices >= best[0] * (1 - 1e-9)
    assert min(mesh.data, mesh.tensor) >= 1


def test_whole_meshes_never_beat_the_limit_and_come_close():
    layer = LAYERS["both"]
    limit = mesh_limit(layer, overlapped=False).devices
    fits = [
        x * y
        for y in range(1, 60)
        for x in range(1, 400)
        if gathering(layer, x, 1, False) + reducing(layer, y, 1) <= computing(layer, 1, False)
    ]
    assert 0.9 * limit < max(fits) <= limit


def test_the_edges_are_reached():
    edges = {name: mesh_limit(layer, overlapped=False) for name, layer in LAYERS.items()}
    assert edges["both"].data > 1
    assert edges["both"].tensor > 1
    assert edges["many tokens"].tensor == 1
    assert edges["slow network"].data == 1


@pytest.fixture(scope="module")
def expressions():
    pytest.importorskip("sympy", reason="the symbolic limits need sympy")
    return symbolic()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_symbols_equal_numbers(expressions, layer):
    import sympy

    names = {"B": layer.tokens, "F": layer.d_ff, "W": layer.bytes_per_second, "C": layer.flops_per_second}
    values = {sympy.Symbol(name, positive=True): value for name, value in names.items()}
    found = {name: float(expression.subs(values)) for name, expression in expressions.items()}
    assert found["DP"] == found["FSDP forward"] == found["FSDP backward"] == pytest.approx(data_limit(layer))
    assert found["TP forward"] == pytest.approx(tensor_limit(layer, "forward"))
    assert found["TP backward"] == pytest.approx(tensor_limit(layer, "backward"))
    assert found["FSDP x TP overlapped"] == pytest.approx(mesh_limit(layer, overlapped=True).devices)
    a, b = layer.data_ratio, layer.trade
    assert found["FSDP x TP not overlapped"] == pytest.approx((1 + a + b) ** 2 / (4 * b))


def test_bad_questions_are_refused():
    with pytest.raises(ValueError, match="tokens must be positive"):
        Layer(tokens=0, d_ff=1, flops_per_second=1, bytes_per_second=1)
    with pytest.raises(ValueError, match="unknown phase"):
        tensor_limit(LAYERS["both"], "sideways")
