"""Saving and resuming a run."""

import contextlib

import numpy as np
import pytest
import torch
from torch.nn import functional

from trainstep.model import checkpoint
from trainstep.model.adamw import AdamW
from trainstep.model.checkpoint import load_checkpoint, save_checkpoint
from trainstep.model.clip import clip_grad_norm
from trainstep.model.data import TokenDataset
from trainstep.model.loss import cross_entropy
from trainstep.model.schedule import cosine_with_warmup
from trainstep.model.transformer import TransformerLM
from trainstep.specs.model import ModelConfig


class Run:
    """A small training run whose every step depends on all that a checkpoint must hold."""

    def __init__(self, path, seed, tie=False, d_model=16):
        torch.manual_seed(seed)
        self.model = TransformerLM(
            ModelConfig(
                name="tiny",
                d_model=d_model,
                d_ff=24,
                n_layers=2,
                n_heads=2,
                vocab_size=50,
                context_length=8,
                tie_embeddings=tie,
            )
        )
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
        self.data = TokenDataset(path, 8)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def train(self, steps):
        """Losses of further steps."""
        losses = []
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = cosine_with_warmup(
                    self.step, max_lr=1e-2, min_lr=1e-3, warmup_steps=3, cosine_steps=12
                )
            inputs, targets = self.data.batch(4, self.generator)
            self.optimizer.zero_grad()
            logits = functional.dropout(self.model(inputs), 0.1)  # draws from the global generator
            loss = cross_entropy(logits, targets)
            loss.backward()
            clip_grad_norm(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "generators": {"data": self.generator}}

    def save(self, path):
        save_checkpoint(path, step=self.step, **self.parts())

    def load(self, path):
        self.step = load_checkpoint(path, **self.parts())


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 50, 500).astype(np.uint16).tofile(path)
    return path


@pytest.mark.parametrize("tie", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, tokens, tie):
    whole = Run(tokens, seed=1, tie=tie)
    whole.train(5)
    whole.save(tmp_path / "run.pt")
    expected = whole.train(6)

    resumed = Run(tokens, seed=2, tie=tie)
    resumed.train(2)  # a state of its own, to be replaced
    resumed.load(tmp_path / "run.pt")
    assert resumed.step == 5
    assert resumed.train(6) == expected
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, value in whole.optimizer.state[theirs].items():
            assert torch.equal(resumed.optimizer.state[ours][name], value)
    assert not tie or resumed.model.head.weight is resumed.model.embedding.weight


def test_saving_changes_nothing(tmp_path, tokens):
    saving, plain = Run(tokens, seed=1), Run(tokens, seed=1)
    torch.manual_seed(7)
    saving.train(2)
    saving.save(tmp_path / "run.pt")
    losses = saving.train(2)
    torch.manual_seed(7)
    plain.train(2)
    assert plain.train(2) == losses


def test_an_interrupted_save_leaves_the_old_file(tmp_path, tokens, monkeypatch):
    run = Run(tokens, seed=1)
    run.train(1)
    path = tmp_path / "run.pt"
    run.save(path)
    before = path.read_bytes()

    def torn(content, file):
        file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", torn)
    with contextlib.suppress(KeyboardInterrupt):
        run.save(path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pt", "tokens.bin"]


def test_bad_files_are_refused_and_change_nothing(tmp_path, tokens):
    run = Run(tokens, seed=1)
    run.train(1)
    run.save(tmp_path / "run.pt")
    whole = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"model": {}}, tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")

    fresh = Run(tokens, seed=3)
    state = {name: value.clone() for name, value in fresh.model.state_dict().items()}
    for name, message in (
        ("cut.pt", r"cut\.pt is damaged or no checkpoint"),
        ("empty.pt", r"empty\.pt is damaged or no checkpoint"),
        ("other.pt", r"other\.pt is no checkpoint of format"),
        ("tensor.pt", r"tensor\.pt is no checkpoint of format"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        fresh.load(tmp_path / "missing.pt")
    with pytest.raises(ValueError, match=r"holds generators \['data'\], asked for \[\]"):
        load_checkpoint(tmp_path / "run.pt", model=fresh.model, optimizer=fresh.optimizer)
    wide = Run(tokens, seed=3, d_model=32)
    before = wide.model.head.weight.detach().clone()
    message = r"another model: embedding\.weight is \(50, 16\) there and \(50, 32\) here"
    with pytest.raises(ValueError, match=message):
        wide.load(tmp_path / "run.pt")
    assert torch.equal(wide.model.head.weight, before)
    with pytest.raises(ValueError, match="another optimizer"):
        load_checkpoint(
            tmp_path / "run.pt",
            model=fresh.model,
            optimizer=AdamW(fresh.model.parameters()),
            generators={"data": fresh.generator},
        )
    assert all(torch.equal(value, state[name]) for name, value in fresh.model.state_dict().items())
    assert not fresh.optimizer.state


def test_an_unwritable_place_is_an_os_error(tmp_path, tokens):
    with pytest.raises(OSError):
        Run(tokens, seed=1).save(tmp_path / "no" / "such" / "run.pt")
