"""How far training on several ranks may end from the exact result: what one process makes wrong measures it.

With two ranks a sum has one order and float32 must be bit-equal; with three or more, gloo's order is its own.
"""

import torch

from benchmarks.measure.error_budget import GRADIENT_FACTOR, budget, compare


class Path:
    """Values that training adds to, and for each the sum of the absolute values of all it added up.

    Attributes:
        values: the parameters by name (tied ones by each name), and with `optimizer` its state by
            (parameter's index, key), as after the last `advance`.
        terms: for each |start| + sum over steps of |change|.
    """

    def __init__(self, model, optimizer=None):
        self._model, self._optimizer = model, optimizer
        self.values = self._read()
        self.terms = {name: value.abs() for name, value in self.values.items()}

    def _read(self):
        values = dict(self._model.named_parameters(remove_duplicate=False))
        if self._optimizer is not None:
            for index, kept in self._optimizer.state_dict()["state"].items():
                values |= {(index, key): value for key, value in kept.items()}
        return {name: value.detach().clone().cpu() for name, value in values.items()}

    def advance(self):
        """Note one step's changes."""
        before, self.values = self.values, self._read()
        for name, value in self.values.items():
            start = before.get(name, torch.zeros_like(value))
            self.terms[name] = self.terms.get(name, start.abs()) + (value - start).abs()

    def finish(self):
        """Keep the values only: the path can then travel to another process."""
        self._model = self._optimizer = None
        return self


def outside_budget(actual, plain, exact):
    """Names of the values that are further from `exact` than three times what `plain` is, and the terms' part.

    Args:
        actual: values by name.
        plain, exact: the paths of the same training in one process in the same dtype and in float64.

    Returns:
        (name, error, budget) of each; a NaN is always among them.
    """
    assert actual.keys() == plain.values.keys() == exact.values.keys()
    found = []
    for name, right in exact.values.items():
        allowed = budget(plain.values[name], right, GRADIENT_FACTOR, exact.terms[name])
        check = compare(actual[name].cpu(), right, allowed)
        if not check.green:
            found.append((name, check.error, check.budget))
    return found


def norms_outside_budget(actual, plain, exact):
    """Steps whose gradient norm is out of budget, as `outside_budget`; the terms' part is that of the norm itself."""
    found = []
    for step, (got, plainly, right) in enumerate(zip(actual, plain, exact, strict=True)):
        got, plainly, right = (torch.tensor(norm, dtype=torch.float64) for norm in (got, plainly, right))
        check = compare(got, right, budget(plainly, right, GRADIENT_FACTOR, right))
        if not check.green:
            found.append((step, check.error, check.budget))
    return found
