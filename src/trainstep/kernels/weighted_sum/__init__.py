"""Weighted sum over the last dimension: the smallest complete kernel, meant to be read first.

    weighted_sum(x, weight) -> y        x [..., D], weight [D], y [...]

    y_r = sum_d x_rd w_d,    dx_rd = g_r w_d,    dw_d = sum_r g_r x_rd    (g: the gradient of y)

Read `reference` (the formula), `triton` (the kernels, one per pass), then `function` (how the kernels become
an operator that autograd and torch.compile know).
"""
