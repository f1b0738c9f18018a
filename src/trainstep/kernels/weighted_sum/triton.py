"""Triton kernels of the weighted sum, forward and backward.

Both walk over tiles [ROWS, COLUMNS] of x. A program owns some rows and loops over the columns, so every sum has a
fixed order and no two programs write the same element: results are deterministic without atomics.

Products of a row and a stride are taken in 64 bits: they pass 2^31 for a tensor of that many elements. So may those
of a column, but only where a column's neighbours lie far apart; WIDE says so.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, num_rows, num_columns, x_stride_row, x_stride_column, weight_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y_r = sum_d x_rd w_d for ROWS rows. Grid: ceil(num_rows / ROWS)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    row_inside = row < num_rows
    total = tl.zeros([ROWS], tl.float32)  # sums are kept in float32 whatever the inputs' dtype
    for first in tl.range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        column_inside = column < num_columns
        across = column.to(tl.int64) if WIDE else column
        # Elements outside the matrix read as 0 and so add nothing.
        x = tl.load(
            x_ptr + row[:, None] * x_stride_row + across[None, :] * x_stride_column,
            mask=row_inside[:, None] & column_inside[None, :],
            other=0.0,
        ).to(tl.float32)  # [ROWS, COLUMNS]
        weight = tl.load(weight_ptr + across * weight_stride, mask=column_inside, other=0.0).to(tl.float32)
        total += tl.sum(x * weight[None, :], 1)
    tl.store(y_ptr + row, total.to(y_ptr.dtype.element_ty), mask=row_inside)


@triton.jit
def backward_kernel(
    x_ptr, weight_ptr, g_ptr, dx_ptr, partial_ptr, num_rows, num_columns, rows_a_program,
    x_stride_row, x_stride_column, weight_stride, g_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dx_rd = g_r w_d, and this program's share of dw_d = sum_r g_r x_rd, for rows_a_program rows.

    dx [num_rows, num_columns] contiguous. The shares [programs, num_columns] float32 are added by the caller:
    rows are spread over programs, and a sum over all rows inside one program would leave the device idle.
    """
    program = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)  # [COLUMNS]
        column_inside = column < num_columns
        across = column.to(tl.int64) if WIDE else column
        weight = tl.load(weight_ptr + across * weight_stride, mask=column_inside, other=0.0).to(tl.float32)
        share = tl.zeros([COLUMNS], tl.float32)
        for step in tl.range(0, rows_a_program, ROWS):
            row = program * rows_a_program + step + tl.arange(0, ROWS)  # [ROWS]
            row_inside = row < num_rows
            inside = row_inside[:, None] & column_inside[None, :]
            g = tl.load(g_ptr + row * g_stride, mask=row_inside, other=0.0).to(tl.float32)
            x = tl.load(
                x_ptr + row[:, None] * x_stride_row + across[None, :] * x_stride_column,
                mask=inside,
                other=0.0,
            ).to(tl.float32)  # [ROWS, COLUMNS]
            share += tl.sum(x * g[:, None], 0)
            dx = g[:, None] * weight[None, :]  # [ROWS, COLUMNS]
            tl.store(
                dx_ptr + row[:, None] * num_columns + column[None, :],
                dx.to(dx_ptr.dtype.element_ty),
                mask=inside,
            )
        tl.store(partial_ptr + program * num_columns + column, share, mask=column_inside)
