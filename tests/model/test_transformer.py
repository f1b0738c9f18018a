"""The language model as a whole: against the formulas written out, its options, and how it is built."""

import copy
import dataclasses
import shutil

import pytest
import torch
from torch.nn import functional

from trainstep.attention.registry import get_attention
from trainstep.model import transformer
from trainstep.model.adamw import AdamW
from trainstep.model.loss import cross_entropy
from trainstep.model.transformer import TransformerLM, layer_window
from trainstep.specs.model import MODELS, ModelConfig, get_model

PARAMETERS = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 3_406_809_600,
    "10b": 12_832_823_808,
}


def tiny(**overrides) -> ModelConfig:
    shape = {"d_model": 32, "d_ff": 40, "n_layers": 2, "n_heads": 4, "vocab_size": 31, "context_length": 16}
    return ModelConfig(name="tiny", **(shape | overrides))


def build(seed=0, dtype=None, fused_projections=False, **overrides) -> TransformerLM:
    torch.manual_seed(seed)
    return TransformerLM(tiny(**overrides), dtype=dtype, fused_projections=fused_projections)


def tokens_of(model, batch=2, length=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator)


def gradients(model, tokens):
    model.zero_grad()
    cross_entropy(model(tokens), tokens.roll(-1, dims=1)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def forward_by_hand(model, tokens, positions=None):
    """Logits in float64 from the weights alone, one query of one head at a time."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    width, group = config.head_dim, config.n_heads // config.kv_heads

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], weights[name], eps=1e-5)

    def rotate(x, position):
        pairs = torch.view_as_complex(x.reshape(-1, 2).contiguous())
        turns = [position * config.rope_theta ** (-2 * i / width) for i in range(width // 2)]
        turns = torch.tensor(turns, dtype=torch.float64)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten()

    logits = []
    for sequence in tokens:
        x = weights["embedding.weight"][sequence]
        places = list(range(len(sequence))) if positions is None else positions.tolist()
        for layer in range(config.n_layers):
            at = f"blocks.{layer}."
            h = norm(x, at + "attention_norm.weight")
            q, k, v = (h @ weights[f"{at}attention.{name}.weight"].T for name in ("query", "key", "value"))
            rows = []
            for i in range(len(sequence)):
                heads = []
                for n in range(config.n_heads):
                    m = n // group
                    keys = range(i + 1)
                    is_global = config.global_every is not None and layer % config.global_every == (
                        config.global_every - 1
                    )
                    if config.window is not None and not is_global:
                        keys = keys[-config.window :]
                    query = q[i, n * width : (n + 1) * width]
                    if config.qk_norm:
                        query = norm(query, at + "attention.query_norm.weight")
                    query = rotate(query, places[i])
                    scores = []
                    for j in keys:
                        key = k[j, m * width : (m + 1) * width]
                        if config.qk_norm:
                            key = norm(key, at + "attention.key_norm.weight")
                        scores.append(query @ rotate(key, places[j]) / width**0.5)
                    shares = torch.stack(scores).softmax(0)
                    pairs = zip(shares, keys, strict=True)
                    heads.append(sum(share * v[j, m * width : (m + 1) * width] for share, j in pairs))
                rows.append(torch.cat(heads))
            x = x + torch.stack(rows) @ weights[at + "attention.output.weight"].T
            h = norm(x, at + "feed_forward_norm.weight")
            gate, up = (h @ weights[f"{at}feed_forward.{name}.weight"].T for name in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ weights[at + "feed_forward.down.weight"].T
        logits.append(norm(x, "norm.weight") @ weights["head.weight"].T)
    return torch.stack(logits)


OPTIONS = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "multi-query": {"n_kv_heads": 1},
    "qk-norm": {"qk_norm": True},
    "window": {"window": 3},
    "local-global": {"window": 3, "global_every": 2, "n_layers": 3},
    "tied": {"tie_embeddings": True},
    "theta": {"rope_theta": 100.0},
    "everything": {"n_kv_heads": 2, "qk_norm": True, "window": 4, "global_every": 2, "tie_embeddings": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_the_formulas(options):
    model = build(**options)
    with torch.no_grad():  # gains of one would hide a norm applied twice or not at all
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    tokens = tokens_of(model)
    logits = model(tokens)
    assert logits.shape == (2, 9, 31) and logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), forward_by_hand(model, tokens), rtol=1e-4, atol=1e-5)


def test_explicit_positions_against_the_formulas():
    model = build()
    tokens, positions = tokens_of(model, batch=1, length=5), torch.tensor([3, 4, 9, 10, 15])
    expected = forward_by_hand(model, tokens, positions)
    torch.testing.assert_close(model(tokens, positions).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(tokens, positions[None]), model(tokens, positions))
    assert not torch.allclose(model(tokens, positions), model(tokens), atol=1e-2)


def test_shifted_positions_change_nothing():
    model = build(dtype=torch.float64)
    tokens = tokens_of(model, length=6)
    torch.testing.assert_close(model(tokens, torch.arange(6) + 10), model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_parameter_counts(name):
    model = TransformerLM(MODELS[name], device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_every_preset_builds_on_the_meta_device():
    for config in MODELS.values():
        model = TransformerLM(config, device="meta")
        d, f, v = config.d_model, config.d_ff, config.vocab_size
        expected = 2 * v * d + config.n_layers * (4 * d * d + 3 * d * f + 2 * d) + d
        assert sum(parameter.numel() for parameter in model.parameters()) == expected
        expected_dtype = torch.bfloat16 if config.name == "8b-32k" else torch.float32
        assert {parameter.dtype for parameter in model.parameters()} == {expected_dtype}


def test_no_biases():
    assert all(name.endswith("weight") for name, _ in build(qk_norm=True).named_parameters())


def seen_by(model, last, length=12):
    """Positions whose token changes the logits at `last`."""
    tokens = tokens_of(model, batch=1, length=length)
    base = model(tokens)[0, last]
    seen = set()
    for position in range(length):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % model.config.vocab_size
        if not torch.equal(model(changed)[0, last], base):
            seen.add(position)
    return seen


@torch.no_grad()
def test_what_a_token_sees():
    assert seen_by(build(), 7) == set(range(8))
    # One window of w reaches w - 1 back; each layer adds as much.
    assert seen_by(build(window=3, n_layers=1), 7) == {5, 6, 7}
    assert seen_by(build(window=3, n_layers=2), 7) == {3, 4, 5, 6, 7}
    # The last layer of the group sees everything, the layers before it do not.
    assert seen_by(build(window=3, n_layers=2, global_every=2), 7) == set(range(8))
    assert seen_by(build(window=3, n_layers=1, global_every=2), 7) == {5, 6, 7}


def test_window_of_each_layer():
    config = tiny(n_layers=7, window=4, global_every=3)
    assert [layer_window(config, layer) for layer in range(7)] == [4, 4, None, 4, 4, None, 4]
    assert [layer_window(tiny(window=4), layer) for layer in range(2)] == [4, 4]


@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2, "qk_norm": True}])
def test_fused_projections_are_the_same_function(options):
    separate = build(seed=0, **options)
    fused = build(seed=9, fused_projections=True, **options)
    weights = separate.state_dict()
    for layer in range(2):
        at = f"blocks.{layer}."
        parts = {
            "attention.query_key_value": [f"attention.{name}" for name in ("query", "key", "value")],
            "feed_forward.gate_up": [f"feed_forward.{name}" for name in ("gate", "up")],
        }
        for packed, names in parts.items():
            weights[f"{at}{packed}.weight"] = torch.cat([weights.pop(f"{at}{name}.weight") for name in names])
    fused.load_state_dict(weights)
    tokens = tokens_of(separate)
    torch.testing.assert_close(fused(tokens), separate(tokens))
    ours, theirs = gradients(fused, tokens), gradients(separate, tokens)
    for layer in range(2):
        at = f"blocks.{layer}."
        for packed, names in parts.items():
            expected = torch.cat([theirs[f"{at}{name}.weight"] for name in names])
            torch.testing.assert_close(ours[f"{at}{packed}.weight"], expected)
    torch.testing.assert_close(ours["embedding.weight"], theirs["embedding.weight"])


def test_fused_projections_start_from_the_same_weights():
    separate, fused = build(seed=3), build(seed=3, fused_projections=True)
    tokens = tokens_of(separate)
    assert len(list(fused.parameters())) == len(list(separate.parameters())) - 2 * 3
    torch.testing.assert_close(fused(tokens), separate(tokens))


def test_tied_head_is_the_embedding_everywhere():
    model = build(tie_embeddings=True)
    names = {name for name, _ in model.named_parameters()}
    assert model.head.weight is model.embedding.weight and "head.weight" not in names
    grads = gradients(model, tokens_of(model))
    untied = build()
    untied.load_state_dict(model.state_dict())
    parts = gradients(untied, tokens_of(model))
    expected = parts["embedding.weight"] + parts["head.weight"]
    torch.testing.assert_close(grads["embedding.weight"], expected)
    for moved in (
        copy.deepcopy(model),
        build(tie_embeddings=True).to(torch.bfloat16),
        TransformerLM(tiny(tie_embeddings=True), device="meta").to_empty(device="cpu"),
    ):
        assert moved.head.weight is moved.embedding.weight


@pytest.mark.parametrize("tie", [False, True])
def test_meta_then_empty_then_reset_equals_built_in_place(tie):
    expected = build(seed=4, tie_embeddings=tie, qk_norm=True)
    model = TransformerLM(tiny(tie_embeddings=tie, qk_norm=True), device="meta").to_empty(device="cpu")
    torch.manual_seed(4)
    model.reset_parameters()
    tokens = tokens_of(model)
    assert torch.equal(model(tokens), expected(tokens))


def test_dtype_policy():
    tokens = tokens_of(build())
    assert build(dtype=torch.bfloat16)(tokens).dtype == torch.bfloat16
    assert TransformerLM(tiny()).head.weight.dtype == torch.float32
    assert TransformerLM(tiny().with_overrides(dtype="bf16")).head.weight.dtype == torch.bfloat16
    assert TransformerLM(tiny().with_overrides(dtype="amp-bf16")).head.weight.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "n_kv_heads": 2}])
def test_autocast(options):
    model = build(**options)
    tokens = tokens_of(model)
    streams = []
    handles = [block.register_forward_hook(lambda *a: streams.append(a[2].dtype)) for block in model.blocks]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = cross_entropy(logits, tokens)
    for handle in handles:
        handle.remove()
    loss.backward()
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert streams == [torch.float32] * 2  # the residual stream stays wide
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    exact = forward_by_hand(model, tokens)
    assert 0 < (logits.double() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("name", ["tiled", "sdpa-math"])
def test_attention_by_name(name):
    plain, other = build(n_kv_heads=2), build(n_kv_heads=2, attention=name)
    tokens = tokens_of(plain)
    called = []
    inner = other.blocks[0].attention.attend
    assert inner is not plain.blocks[0].attention.attend
    other.blocks[0].attention.attend = lambda *args, **options: (
        called.append(options) or inner(*args, **options)
    )
    torch.testing.assert_close(other(tokens), plain(tokens))
    assert called == [{"causal": True, "window": None}]
    ours, theirs = gradients(other, tokens), gradients(plain, tokens)
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("policy", ["every-block", "groups-2", "recursive", "selective"])
def test_checkpointing_saves_less_and_changes_no_bit(frozen, policy):
    plain, checkpointed = build(n_layers=4), build(n_layers=4, checkpoint=policy)
    tokens = tokens_of(plain)
    saved = {}
    for model in (plain, checkpointed):
        model.embedding.weight.requires_grad_(not frozen)
        count = saved.setdefault(model, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda t, c=count: c.append(t) or t, lambda t: t):
            loss = cross_entropy(model(tokens), tokens)
        loss.backward()
    assert len(saved[checkpointed]) < len(saved[plain]) / 2
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == (not theirs.requires_grad)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_run_blocks_can_be_replaced():
    model = build()
    ran = []

    def backwards(blocks, x, positions):
        ran.append((len(blocks), x.shape, positions))
        return x

    model.run_blocks = backwards
    tokens = tokens_of(model)
    expected = model.head(model.norm(model.embedding(tokens)))
    assert torch.equal(model(tokens), expected) and ran == [(2, (2, 9, 32), None)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention": "no-such"}, "unknown attention implementation 'no-such'; known: reference"),
        ({"checkpoint": "no-such"}, "unknown checkpointing policy 'no-such'; known: none"),
    ],
)
def test_unknown_names_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        TransformerLM(tiny(**overrides), device="meta")


@pytest.mark.parametrize(
    ("options", "cannot", "message"),
    [
        ({"n_kv_heads": 1}, "grouped_query", "no grouped-query heads"),
        ({"window": 2}, "window", "no window"),
    ],
)
def test_options_the_implementation_lacks_are_refused(monkeypatch, options, cannot, message):
    poor = dataclasses.replace(get_attention("reference"), **{cannot: False})
    monkeypatch.setattr(transformer, "get_attention", lambda name: poor)
    with pytest.raises(ValueError, match=message):
        TransformerLM(tiny(**options), device="meta")
    TransformerLM(tiny(), device="meta")


def test_too_long_a_sequence_is_refused():
    model = build()
    with pytest.raises(ValueError, match="17 tokens is longer than the context length 16"):
        model(tokens_of(model, length=17))


def test_compiles_into_kernels():
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ to make CPU kernels")
    model = build(n_layers=1)
    tokens = tokens_of(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))


@pytest.mark.parametrize(("fused", "checkpoint"), [(False, "none"), (True, "none"), (False, "every-block")])
def test_compiles_into_one_graph(fused, checkpoint):
    """Traced by torch.compile and differentiated by AOTAutograd, without making kernels."""
    model = build(window=3, global_every=2, n_kv_heads=2, fused_projections=fused, checkpoint=checkpoint)
    tokens = tokens_of(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    cross_entropy(compiled(tokens), tokens).backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cross_entropy(model(tokens), tokens).backward()
    for gradient, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_learns():
    """A tiny model memorises one batch: gradients, optimizer and loss pull the same way."""
    model = build()
    tokens = tokens_of(model, batch=2, length=10)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_preset_overrides_reach_the_model():
    model = TransformerLM(get_model("toy", n_layers=3, context_length=8, n_kv_heads=1), device="meta")
    assert len(model.blocks) == 3 and model.blocks[0].attention.key.d_out == 16
