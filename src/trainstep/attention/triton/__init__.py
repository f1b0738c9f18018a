"""FlashAttention-2 as Triton kernels for any CUDA device (and Triton's interpreter).

Reading order: `primitives` (the algorithm's steps on one tile), `forward`, `backward` (the kernels), `tuning`
(tile shapes), `launch` (grids and strides), `function` (operators, autograd, the public function).
"""
