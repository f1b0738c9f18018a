"""Step cases on a CPU: how `ours` is put together, its check, the warm-up study."""

from dataclasses import replace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.cases import step as table
from benchmarks.cases.step_check import check
from benchmarks.measure.record import load
from trainstep.specs.model import get_model

# `ours` as far as a CPU goes: its attention and its CUDA graph left out.
OURS = replace(
    table.ROWS["ours"],
    attention="reference",
    float32_attention=None,
    cuda_graph=False,
    devices=("cpu",),
)


@pytest.fixture
def graphs(monkeypatch):
    """Compiled graphs, counted; AOTAutograd runs as in earnest, Inductor's minute of C++ does not."""
    from torch._dynamo.backends.debugging import aot_eager

    found = []

    def compile_fx(graph, inputs, **options):
        found.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    yield found
    torch.compiler.reset()


def config_of(**overrides):
    return get_model("toy", **({"context_length": 16, "vocab_size": 50, "batch_size": 2} | overrides))


def train(step, steps, phase="train_step"):
    losses = []
    for _ in range(steps):
        step.reset_gradients()
        for _, part in step.parts(phase):
            part()
        losses.append(step.loss.item())
    return losses


def test_blocks_share_one_graph(graphs):
    step = table.Step(OURS, config_of(n_layers=4), "amp-bf16", "cpu")
    train(step, 2)
    assert len(graphs) == 2, "one for four blocks, one for norm, head and loss"


def test_peers_compile_the_model_as_one_graph(graphs):
    step = table.Step(table.ROWS["best-parts"], config_of(), "fp32", "cpu")
    train(step, 1)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
def test_ours_trains_as_plain_does(graphs, dtype, monkeypatch):
    monkeypatch.setattr(table, "LEARNING_RATE", 1e-2)
    plain = train(table.Step(table.ROWS["plain"], config_of(), dtype, "cpu"), 4)
    ours = train(table.Step(OURS, config_of(), dtype, "cpu"), 4)
    assert ours == pytest.approx(plain, rel=1e-4 if dtype == "fp32" else 5e-3)
    assert plain[3] < plain[0] - 0.1, "the updates are large enough to be seen"


def test_only_a_whole_step_moves_parameters(graphs):
    step = table.Step(OURS, config_of(), "amp-bf16", "cpu")
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    train(step, 1, "forward_backward")
    assert all(parameter.grad is not None for parameter in step.model.parameters())
    assert all(map(torch.equal, before, step.model.parameters()))
    train(step, 1, "train_step")
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not torch.equal(before[0], next(step.model.parameters()))


@pytest.mark.parametrize("dtype", ["amp-fp16", "bf16", "fp64"])
def test_ours_refuses_what_it_cannot_update(dtype):
    with pytest.raises(NotImplementedError, match=f"not {dtype}"):
        table.Step(OURS, config_of(), dtype, "cpu")


@pytest.mark.parametrize(("dtype", "attention"), [("fp32", "sdpa"), ("tf32", "sdpa"), ("amp-bf16", "tiled")])
def test_float32_has_an_attention_of_its_own(dtype, attention):
    row = replace(OURS, attention="tiled", float32_attention="sdpa", compile=None)
    assert table.Step(row, config_of(), dtype, "cpu").model.config.attention == attention


def test_an_error_of_one_part_in_ten_thousand_is_red(monkeypatch):
    assert check.__wrapped__("plain", "fp32", "cpu").green

    class Wrong(table.Step):
        def forward(self):
            super().forward()
            if self.row.name == "wrong":
                self.loss = self.loss * 1.0001

    monkeypatch.setitem(table.ROWS, "wrong", table.StepRow(name="wrong"))
    monkeypatch.setattr(table, "Step", Wrong)
    assert not check.__wrapped__("wrong", "fp32", "cpu").green


class Idle(table.Step):
    """An optimizer that does nothing, where the row says so."""

    def update(self):
        if self.row.name != "wrong":
            super().update()


class Steep(table.Step):
    """One weight's gradients too large by a tenth: AdamW's first update hardly changes with it."""

    def backward(self):
        super().backward()
        if self.row.name == "wrong":
            self.model.blocks[0].attention.value.weight.grad.mul_(1.1)


@pytest.mark.parametrize("fault", [Idle, Steep])
@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
def test_a_wrong_step_is_red_though_its_loss_is_right(fault, dtype, monkeypatch):
    monkeypatch.setitem(table.ROWS, "wrong", table.StepRow(name="wrong"))
    monkeypatch.setattr(table, "Step", fault)
    assert check.__wrapped__("plain", dtype, "cpu").green
    assert not check.__wrapped__("wrong", dtype, "cpu").green


@pytest.mark.parametrize("dtype", ["fp32", "amp-bf16"])
def test_ours_is_green_and_red_if_its_graph_replays_nothing(graphs, dtype, monkeypatch):
    def capture(replays):
        def captured(step, phase):
            train(step, table.CAPTURE_WARMUPS)
            return lambda: train(step, 1) if replays else None

        return captured

    monkeypatch.setitem(table.ROWS, "ours", replace(OURS, cuda_graph=True))
    for replays in (True, False):
        monkeypatch.setattr(table.Step, "capture", capture(replays))
        assert check.__wrapped__("ours", dtype, "cpu").green == replays


def test_a_warmup_study_measures_side_by_side(tmp_path, capsys):
    out = tmp_path / "study.jsonl"
    words = ["step", "toy", "--context", "16", "--layers", "1", "--vocabulary", "50", "--target", "plain"]
    words += [
        "--mode",
        "train_step",
        "--device",
        "cpu",
        "--warmup",
        "0,1,2,5",
        "--steps",
        "5",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    assert "Warm-up study" in capsys.readouterr().out
    for count in (0, 1, 2, 5):
        (row,), problems = load([tmp_path / f"study-w{count}.jsonl"])
        assert not problems and row.status == "ok" and row.env["warmup"] == count
        assert len(row.samples_seconds) == 5 and row.first_seconds is not None
        # Without warm-up the first call of all is a sample too.
        assert (row.first_seconds == row.samples_seconds[0]) == (count == 0)
