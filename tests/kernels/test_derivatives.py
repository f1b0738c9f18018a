"""Derivatives that a kernel does not have are refused in one line that names it; none is silently wrong."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from trainstep.kernels.adamw.function import adamw_
from trainstep.kernels.weighted_sum.function import weighted_sum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def summed(x, weight):
    return weighted_sum(x, weight).sum()


@pytest.mark.parametrize("which", [0, 1])
def test_forward_mode_of_the_weighted_sum(which):
    x = [torch.ones(3, 4, device=DEVICE), torch.ones(4, device=DEVICE)]
    with pytest.raises(NotImplementedError, match=r"^the Triton weighted sum has no forward-mode derivative"):
        jvp(lambda y: summed(*x[:which], y, *x[which + 1 :]), (x[which],), (x[which],))
    with forward_ad.dual_level():
        x[which] = forward_ad.make_dual(x[which], torch.ones_like(x[which]))
        with pytest.raises(
            NotImplementedError, match=r"^the Triton weighted sum has no forward-mode derivative"
        ):
            weighted_sum(*x)


@pytest.mark.parametrize(
    "transform",
    [lambda f: grad(f, argnums=1), lambda f: vmap(grad(f), in_dims=(0, None)),
     lambda f: grad(lambda x, weight: vmap(f, in_dims=(0, None))(x, weight).sum())],
    ids=["grad", "vmap of grad", "grad of vmap"],
)  # fmt: skip
def test_func_gradients_of_the_weighted_sum(transform):
    x, weight = torch.ones(2, 3, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    with pytest.raises(
        NotImplementedError, match=r"^the Triton weighted sum has no derivative in torch\.func"
    ):
        transform(summed)(x, weight)


def test_vmap_of_the_weighted_sum():
    x = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    weight = torch.randn(4, device=DEVICE)
    y = vmap(weighted_sum, in_dims=(0, None))(x, weight)
    torch.testing.assert_close(y, x @ weight)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, weight.expand_as(x))


def update(master, gradient):
    """One step, as a function of two of its inputs."""
    master, mean, square = master.clone(), torch.zeros(8, device=DEVICE), torch.ones(8, device=DEVICE)
    step = torch.ones((), device=DEVICE)
    adamw_(master, gradient, mean, square, step, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return master.sum()


@pytest.mark.parametrize("which", [0, 1], ids=["master", "gradient"])
@pytest.mark.parametrize("way", ["autograd", "grad", "vmap", "jvp", "dual"])
def test_derivatives_of_adamw(way, which):
    one = torch.ones(8, device=DEVICE)

    def of(x):
        return update(x, one) if which == 0 else update(one, x)

    with pytest.raises(NotImplementedError, match=r"^the Triton AdamW has no derivative"):
        if way == "autograd":
            of(one.clone().requires_grad_())
        elif way == "grad":
            grad(of)(one)
        elif way == "vmap":
            vmap(of)(torch.ones(2, 8, device=DEVICE))
        elif way == "jvp":
            jvp(of, (one,), (one,))
        else:
            with forward_ad.dual_level():
                of(forward_ad.make_dual(one, one))


def test_adamw_of_parameters_without_a_graph():
    # As optimizers do; and a graph around it that has no part in the update does not matter.
    with torch.no_grad():
        update(torch.ones(8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE))
    update(torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE))
