"""Attention behind one contract: reference, FlashAttention-2 (tiled PyTorch, Triton) and the peers.

    attention(q, k, v, *, causal=False, window=None, scale=None, alignment="bottom-right", return_lse=False)

- q [B, N, S, H], k and v [B, K, T, H]; or all three [B, S, H], one head. float32, float16 or bfloat16, one
  dtype and one device for all; B, N, K, S, T >= 1; H from 8 to 256; any strides. Query head n reads key/value
  head n // (N / K). Inside autocast the inputs are cast to its dtype first.
- Returns O = softmax(scale * Q K^T + mask) V like q; with `return_lse` also the natural logarithm of the sum
  of the exponentials of the scaled scores, [B, N, S] float32. Both are differentiable, once, in reverse
  mode, by `torch.autograd` and by `torch.func`, whose vmap takes them as well. The reference has all others;
  the fused implementations refuse them.
- `scale` is positive, 1/sqrt(H) by default.
- `causal`: query i sees key j when j <= i + d, with d = T - S for alignment "bottom-right" (the last query
  sees every key) and d = 0 for "top-left". `window`, a whole number w from 1,
  needs causal and adds j > i + d - w.
- A query that sees no key gives zeros, -inf and zero gradients.
- In the fused implementations a key or value that a query does not see never touches its results, even when
  it is NaN or infinite; a value that it does see and that is not finite makes the whole output row NaN.
- Gradients have the inputs' dtypes. The same call on the same device gives the same bits.

`contract` checks calls, `masks` holds the rule of who sees whom, `registry` lists the implementations.
"""

from trainstep.attention.registry import ATTENTION, AttentionRow, get_attention, load_attention

__all__ = ["ATTENTION", "AttentionRow", "get_attention", "load_attention"]
