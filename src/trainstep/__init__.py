"""Readable implementations of the systems side of language-model training: what is measured."""
