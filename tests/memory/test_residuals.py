"""The residual recorder: known answers, paths, operations, storages.

Compiled answers use the compiler's partitioner without its code generator: it is the partitioner that decides
what is saved, and it runs on the meta device, where a 3.6 GiB block costs nothing. One slow test holds it
against the whole compiler.
"""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.memory.plain_block import PlainBlock, PlainRMSNorm, plain_blocks
from trainstep.memory import checkpointing
from trainstep.memory.residuals import record_residuals
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import get_model

PARTITION = "aot_eager_decomp_partition"
MIB = 2**20


def compiled(module, backend=PARTITION):
    torch.compiler.reset()
    return torch.compile(module, backend=backend, dynamic=False, fullgraph=True)


def saved_by(module, *inputs):
    with record_residuals(module) as recorder:
        module(*inputs)
    return recorder.residuals()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rms_norm_six_saves_eager_three_compiled(device):
    norm = PlainRMSNorm(2560, device)
    x = torch.empty(4, 512, 2560, device=device, requires_grad=True)
    eager, partitioned = saved_by(norm, x), saved_by(compiled(norm), x)
    assert len(eager.saves) == 6
    assert len(eager.storages) == 3
    assert len(partitioned.saves) == 3
    assert len(partitioned.storages) == 2
    # x, the reciprocal root and x times it; compiled recomputes the last.
    assert eager.total_bytes == 2 * 4 * 512 * 2560 * 4 + 4 * 512 * 4
    assert partitioned.total_bytes == 4 * 512 * 2560 * 4 + 4 * 512 * 4


def test_residual_stream_of_xl_is_20_mib():
    x = torch.empty(4, 512, 2560, device="meta", requires_grad=True)
    residuals = saved_by(PlainRMSNorm(2560, "meta"), x)
    assert residuals.saves[0].bytes / MIB == 20


def test_plain_xl_block_saves_3651_mib_compiled():
    """Tensor by tensor in MiB, for 4*2048 tokens; weights are not counted.

    Input, normed input, q, k, v, attention's result, middle, normed middle: 80 each. Gate, up and their
    product: 320 each. Scores and softmax weights: 1024 each. Row maximum, its index (8 bytes) and row sum: 2.
    cos and sin: 1.25. Two reciprocal roots: 1/16. Positions: 1/64.
    """
    block = PlainBlock(2560, 10240, 16, 2048, "meta")
    positions = torch.arange(2048, device="meta")
    x = torch.empty(4, 2048, 2560, device="meta", requires_grad=True)
    residuals = saved_by(compiled(block), x, positions)
    expected = 8 * 80 + 3 * 320 + 2 * 1024 + 2 + 1.25 + 1 / 16 + 1 / 64
    assert residuals.total_bytes / MIB == expected
    assert f"{residuals.total_bytes / MIB:.1f}" == "3651.3"
    assert f"{4 * residuals.total_bytes / MIB:.0f}" == "14605"


def test_where_our_block_saves_less_than_the_plain_one():
    """Compiled at one shape, tensor by tensor: our softmax is torch's, whose backward needs its result only.

    Not saved: the scores, each row's maximum with its index and its sum, and the positions, which ours takes
    from the table's own order. At the known answer's shape that is 3651.3 - 1024 - 2 - 1/64 = 2625.3 MiB.
    """
    batch, length, width, heads = 2, 64, 32, 4
    plain, positions = plain_blocks(1, d_model=width, n_heads=heads, length=length)
    config = get_model(
        "toy",
        batch_size=batch,
        context_length=length,
        d_model=width,
        d_ff=4 * width,
        n_heads=heads,
        n_layers=1,
    )
    x = torch.randn(batch, length, width, requires_grad=True)
    theirs = saved_by(compiled(plain[0]), x, positions)
    ours = saved_by(compiled(TransformerLM(config).blocks[0]), x)

    def tensors(residuals):
        return Counter((save.dtype, save.bytes) for save in residuals.storages)

    rows = batch * heads * length
    assert tensors(theirs) - tensors(ours) == {
        (torch.float32, 4 * rows * length): 1,
        (torch.float32, 4 * rows): 2,
        (torch.int64, 8 * rows): 1,
        (torch.int64, 8 * length): 1,
    }
    assert tensors(ours) - tensors(theirs) == {}


def test_four_blocks_as_two_checkpoints_keep_160_mib():
    blocks = [PlainBlock(2560, 10240, 16, 2048, "meta") for _ in range(4)]
    positions = torch.arange(2048, device="meta")
    x = torch.empty(4, 2048, 2560, device="meta", requires_grad=True)

    def with_positions(block):
        return lambda x: block(x, positions)

    with record_residuals(nn.ModuleList(blocks)) as recorder:
        checkpointing.run([with_positions(block) for block in blocks], x, policy="groups-2")
    residuals = recorder.residuals()
    assert [save.kind for save in residuals.saves] == ["boundary", "boundary"]
    assert f"{residuals.total_bytes / MIB:.2f}" == "160.00"


@pytest.mark.slow
def test_the_partitioner_alone_answers_as_the_whole_compiler():
    norm = PlainRMSNorm(64)
    x = torch.randn(2, 16, 64, requires_grad=True)
    alone, whole = saved_by(compiled(norm), x), saved_by(compiled(norm, "inductor"), x)
    assert [(s.shape, s.dtype, s.bytes, s.kind) for s in alone.saves] == [
        (s.shape, s.dtype, s.bytes, s.kind) for s in whole.saves
    ]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))

    def forward(self, x):
        return (self.second(self.first(x)) * self.scale).exp()


def test_paths_operations_and_kinds():
    model = Branches()
    residuals = saved_by(model, torch.randn(2, 4, requires_grad=True))
    seen = {(save.module, save.operation, save.kind) for save in residuals.saves}
    assert ("first.0", "leaf", "activation") in seen
    assert ("first.1", "Tanh", "activation") in seen
    assert ("", "Exp", "activation") in seen
    assert ("", "leaf", "buffer") in seen
    assert ("second", "leaf", "parameter") in seen  # a transposed view of the weight
    assert residuals.module_bytes("first") == 2 * 4 * 4 + 2 * 8 * 4
    assert residuals.module_bytes("sec") == 0
    assert residuals.buffer_bytes == 16
    assert residuals.activation_bytes == residuals.total_bytes - 16


def test_views_go_by_what_filled_them():
    x = torch.randn(2, 3, 4, requires_grad=True)
    with record_residuals() as recorder:
        y = x.cos().transpose(0, 1).unsqueeze(0)
        y.pow(2).sum()
    assert recorder.residuals().saves[-1].operation == "Cos"


def test_a_function_that_saves_its_own_tensors_is_named():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.new_full((7,), 2.0))
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0][0]

    with record_residuals() as recorder:
        Doubling.apply(torch.ones(3, requires_grad=True))
    (save,) = recorder.residuals().saves
    assert (save.operation, save.bytes) == ("Doubling", 28)


def test_largest_operations_share_the_total():
    blocks, positions = plain_blocks(2)
    residuals = saved_by(_Stack(blocks), torch.randn(2, 16, 32, requires_grad=True), positions)
    largest = residuals.largest_operations()
    assert len(largest) == 5
    assert [o.bytes for o in largest] == sorted((o.bytes for o in largest), reverse=True)
    everything = residuals.largest_operations(count=100)
    assert sum(o.bytes for o in everything) == residuals.total_bytes
    assert sum(o.share for o in everything) == pytest.approx(1)
    by_block = residuals.module_bytes("blocks.0") + residuals.module_bytes("blocks.1")
    assert by_block == residuals.total_bytes


class _Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x, *args):
        for block in self.blocks:
            x = block(x, *args)
        return x


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_blocks_keep_their_paths(how):
    torch.compiler.reset()
    blocks, positions = plain_blocks(2)
    if how == "in place":
        for block in blocks:
            block.compile(backend=PARTITION, dynamic=False)
        calls = [block._compiled_call_impl for block in blocks]
    else:
        blocks = nn.ModuleList(torch.compile(block, backend=PARTITION, dynamic=False) for block in blocks)
    stack = _Stack(blocks)
    residuals = saved_by(stack, torch.randn(2, 16, 32, requires_grad=True), positions)
    assert residuals.module_bytes("blocks.0") > residuals.module_bytes("blocks.1") > 0
    assert residuals.module_bytes("blocks") == residuals.total_bytes
    if how == "in place":
        assert [block._compiled_call_impl for block in blocks] == calls


def test_saved_storages_are_not_confused_when_memory_is_reused():
    with record_residuals() as recorder:
        for _ in range(5):
            torch.randn(1000, requires_grad=True).exp()  # the graph dies at once, its memory comes back
    assert len(recorder.residuals().storages) == 5


def test_recording_changes_no_gradient_and_leaks_no_graph():
    blocks, positions = plain_blocks(1)
    x = torch.randn(2, 16, 32, requires_grad=True)
    blocks[0](x, positions).sum().backward()
    plain = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()
    with record_residuals(blocks):
        y = blocks[0](x, positions)
    y.sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(blocks.parameters(), plain, strict=True))

    import weakref

    with record_residuals():
        result = torch.ones(3, requires_grad=True).exp()  # exp saves its own result
    alive = weakref.ref(result)
    del result
    assert alive() is None


def test_nothing_stays_switched_on_after_an_exception():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken block")

    model = nn.Sequential(nn.Linear(4, 4), Broken())
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="broken block"), record_residuals(model) as recorder:
        model(x)
    before = len(recorder.residuals().saves)
    model[0](x).exp()
    assert len(recorder.residuals().saves) == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_checkpoint_keeps_its_input_only():
    model = Branches()
    x = torch.randn(2, 4, requires_grad=True)
    with record_residuals(model) as recorder:
        checkpoint(model, x, use_reentrant=False)
    (save,) = recorder.residuals().saves
    assert (save.kind, save.bytes) == ("boundary", 32)
