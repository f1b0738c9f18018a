"""Collectives on send and receive: every rank sends to its right neighbour and receives from its left.

With N ranks and a tensor of S bytes a rank sends (N-1)/N * S in a reduce-scatter or an all-gather, twice that
in an all-reduce, and (N-1) * S when whole tensors go round. Each function also returns the bytes this rank
really sent; where N does not divide the elements, chunks differ by one element and these counts are exact for
the chunks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def _chunks(flat: Tensor, size: int) -> list[Tensor]:
    """Split `flat` [M] into `size` contiguous views; the first M mod size are one element longer."""
    return list(torch.tensor_split(flat, size))


def _pass_on(send: Tensor, receive: Tensor, group: Group) -> int:
    """Send to the right neighbour while receiving from the left; bytes sent.

    Both contiguous. Empty chunks are skipped: sender and receiver know their length alike.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operations = []
    if send.numel():
        operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % size))
    if receive.numel():
        operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank - 1) % size))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return send.numel() * send.element_size()


def reduce_scatter(tensor: Tensor, group: Group = None) -> tuple[Tensor, int]:
    """Sum over ranks, one chunk a rank.

    Args:
        tensor: the same shape and dtype on every rank, M elements; unchanged.
        group: ranks that take part; None means all.

    Returns:
        This rank's chunk of the flattened sum, `torch.tensor_split(flat, N)[rank]`, and the bytes it sent.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = _chunks(tensor.reshape(-1).clone(), size)
    sent = 0
    # Chunk c starts at rank c+1 and ends, having met every rank's share, at rank c.
    for step in range(1, size):
        going, coming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        received = torch.empty_like(coming)
        sent += _pass_on(going, received, group)
        coming += received
    return chunks[rank].clone(), sent


def all_gather(chunk: Tensor, numel: int | None = None, group: Group = None) -> tuple[Tensor, int]:
    """Join every rank's chunk.

    Args:
        chunk: [M_rank], as `reduce_scatter` returns it.
        numel: M, the sum of all chunks' lengths; None means N equal chunks.
        group: ranks that take part; None means all.

    Returns:
        The joined tensor [M] and the bytes this rank sent.

    Raises:
        ValueError: the chunk's length is not this rank's share of `numel`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    full = chunk.new_empty(chunk.numel() * size if numel is None else numel)
    chunks = _chunks(full, size)
    if chunks[rank].numel() != chunk.numel():
        raise ValueError(
            f"rank {rank}'s share of {full.numel()} elements is {chunks[rank].numel()}, got {chunk.numel()}"
        )
    chunks[rank].copy_(chunk.reshape(-1))
    sent = 0
    for step in range(size - 1):
        sent += _pass_on(chunks[(rank - step) % size], chunks[(rank - step - 1) % size], group)
    return full, sent


def all_reduce(tensor: Tensor, group: Group = None) -> tuple[Tensor, int]:
    """Sum over ranks: a reduce-scatter, then an all-gather; bit-identical on every rank.

    Args:
        tensor: the same shape and dtype on every rank; unchanged.
        group: ranks that take part; None means all.

    Returns:
        The sum in the tensor's shape, and the bytes this rank sent.
    """
    chunk, scattered = reduce_scatter(tensor, group)
    full, gathered = all_gather(chunk, tensor.numel(), group)
    return full.view(tensor.shape), scattered + gathered


def whole_tensor_all_reduce(tensor: Tensor, group: Group = None) -> tuple[Tensor, int]:
    """Sum over ranks by passing whole tensors round: N-1 times, each rank adds what comes by.

    Ranks add in different orders, so with more than two ranks their sums may differ in the last bit.

    Args:
        tensor: the same shape and dtype on every rank; unchanged.
        group: ranks that take part; None means all.

    Returns:
        The sum in the tensor's shape, and the bytes this rank sent.
    """
    total = tensor.clone(memory_format=torch.contiguous_format)
    passing = total.clone()
    sent = 0
    for _ in range(dist.get_world_size(group) - 1):
        received = torch.empty_like(passing)
        sent += _pass_on(passing, received, group)
        total += received
        passing = received
    return total, sent
