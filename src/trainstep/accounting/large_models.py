"""Models to plan for that are too large to be a preset here: shapes as published."""

from trainstep.specs.model import MODELS, ModelConfig, get_model

LARGE_MODELS = {
    model.name: model
    for model in (
        # Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3 (context of the main pre-training
        # phase).
        ModelConfig(
            name="70b",
            d_model=8192,
            d_ff=28_672,
            n_layers=80,
            n_heads=64,
            n_kv_heads=8,
            vocab_size=128_256,
            context_length=8192,
            batch_size=1,
            dtype="bf16",
            rope_theta=500_000.0,
        ),
        ModelConfig(
            name="405b",
            d_model=16_384,
            d_ff=53_248,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            vocab_size=128_256,
            context_length=8192,
            batch_size=1,
            dtype="bf16",
            rope_theta=500_000.0,
        ),
    )
}


def find_model(name: str, **overrides: object) -> ModelConfig:
    """A preset or one of the large models, with overrides.

    Raises:
        ValueError: the name is unknown (the message lists the known ones), or an override is not buildable.
    """
    if name in LARGE_MODELS:
        return LARGE_MODELS[name].with_overrides(**overrides)
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join([*MODELS, *LARGE_MODELS])}")
    return get_model(name, **overrides)
