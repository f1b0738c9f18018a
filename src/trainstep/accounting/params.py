"""Parameters of a model, counted from its shape alone."""

from trainstep.specs.model import ModelConfig


def by_component(config: ModelConfig) -> dict[str, int]:
    """Parameters of the whole model by component, in the order of the forward pass.

    A block holds four attention projections (D x D for queries and output, D x KH for keys and values), three
    SwiGLU matrices (D x F) and two RMSNorm gains (D); QK-norm adds two gains of the head width H. No biases.
    A tied output projection is the embedding's weight and counts 0 here.
    """
    d, h, layers = config.d_model, config.head_dim, config.n_layers
    embedding = config.vocab_size * d
    attention = 2 * d * d + 2 * d * config.kv_heads * h
    return {
        "embedding": embedding,
        "attention": layers * attention,
        "qk_norm": layers * 2 * h if config.qk_norm else 0,
        "ffn": layers * 3 * d * config.d_ff,
        "norms": layers * 2 * d + d,
        "lm_head": 0 if config.tie_embeddings else embedding,
    }


def count(config: ModelConfig) -> int:
    """All parameters: 2VD + L(4D^2 + 2D + 3DF) + D for the plain model (untied, K = N, no QK-norm)."""
    return sum(by_component(config).values())


def block(config: ModelConfig) -> int:
    """Parameters of one block."""
    parts = by_component(config)
    return (sum(parts.values()) - parts["embedding"] - parts["lm_head"] - config.d_model) // config.n_layers
