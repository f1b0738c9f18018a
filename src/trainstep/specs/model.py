"""Model sizes as a literal table."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one decoder-only Transformer language model and of the batch it trains on.

    Symbols of the literature in brackets. Checked when made, so every instance is buildable.

    Attributes:
        name: preset name, kept through overrides.
        d_model: residual width [D].
        d_ff: SwiGLU hidden width [F].
        n_layers: blocks [L].
        n_heads: query heads [N]; the head width is H = D / N.
        n_kv_heads: key/value heads [K]; None means K = N, 1 is multi-query.
        vocab_size: tokens in the vocabulary [V].
        context_length: tokens a sequence [S].
        batch_size: sequences a step [B].
        dtype: short name of the default dtype, see `specs.dtype`.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: output projection shares the embedding's weight.
        qk_norm: RMSNorm over the head width on queries and keys before RoPE.
        window: sliding-window width in keys, None for full causal attention.
        global_every: with a window, every such layer (the last of each group) attends globally; None: all local.
        attention: name of the attention implementation, see `attention.registry`.
        checkpoint: name of the activation-checkpointing policy.
    """

    name: str
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    vocab_size: int = 10_000
    context_length: int = 512
    batch_size: int = 4
    dtype: str = "fp32"
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    qk_norm: bool = False
    window: int | None = None
    global_every: int | None = None
    attention: str = "reference"
    checkpoint: str = "none"

    def __post_init__(self) -> None:
        for field in ("d_model", "d_ff", "n_layers", "n_heads", "vocab_size", "context_length", "batch_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be a positive integer, got {value!r}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head width {self.head_dim} is odd; RoPE rotates pairs")
        kv = self.n_kv_heads
        if kv is not None and (kv < 1 or self.n_heads % kv):
            raise ValueError(f"n_kv_heads must divide n_heads {self.n_heads}, got {kv}")
        for field in ("window", "global_every"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")

    @property
    def head_dim(self) -> int:
        """Head width H."""
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Key/value heads K with the default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    def with_overrides(self, **overrides: object) -> "ModelConfig":
        """A checked copy with some fields replaced; None leaves the preset's value."""
        return replace(self, **{key: value for key, value in overrides.items() if value is not None})  # type: ignore[arg-type]


MODELS = {
    model.name: model
    for model in (
        ModelConfig(name="toy", d_model=64, d_ff=256, n_layers=2, n_heads=4),
        ModelConfig(name="small", d_model=768, d_ff=3072, n_layers=12, n_heads=12),
        ModelConfig(name="medium", d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
        ModelConfig(name="large", d_model=1280, d_ff=5120, n_layers=36, n_heads=20),
        ModelConfig(name="xl", d_model=2560, d_ff=10240, n_layers=32, n_heads=32),
        ModelConfig(name="10b", d_model=4608, d_ff=12288, n_layers=50, n_heads=36),
        ModelConfig(
            name="8b-32k",
            d_model=4096,
            d_ff=11008,
            n_layers=34,
            n_heads=32,
            vocab_size=151_936,
            context_length=32_768,
            batch_size=1,
            dtype="bf16",
        ),
    )
}


def get_model(name: str, **overrides: object) -> ModelConfig:
    """Look a preset up and apply overrides.

    Raises:
        ValueError: the preset is unknown (the message lists the known ones) or an override is not buildable.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model preset {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name].with_overrides(**overrides)
