"""Generators: networks that make images from latents, trained ones and fresh ones.

A generator is an ``nn.Module`` with ``image_size``, ``channels`` (1 or 3), ``latent_size`` and

    latents(z)                 from z ~ N(0, 1), (B, latent_size), to the space that is searched
    forward(latents, labels)   to images (B, channels, H, W) in [0, 1]

Its file is a safetensors checkpoint that says in its metadata what it is and what it was trained
on. Your own class is named by its import path ``package.module:Class``, in the spec: a file that
names one is not believed. It may leave out ``latents`` (then z itself is searched), ``image_size``
and ``channels`` (then a trial image tells).
"""

from fedsim.attacks.generators.checkpoint import (
    GENERATORS,
    create_generator,
    generator_metadata,
    image_size_of,
    load_generator,
    save_generator,
)
from fedsim.attacks.generators.network import (
    check_generator,
    decode,
    generate,
    latent_size,
    latents_of,
    takes_labels,
)

__all__ = [
    "GENERATORS",
    "check_generator",
    "create_generator",
    "decode",
    "generate",
    "generator_metadata",
    "image_size_of",
    "latent_size",
    "latents_of",
    "load_generator",
    "save_generator",
    "takes_labels",
]
