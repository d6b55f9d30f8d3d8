"""photoapp: a ViT learned from the pictures of several clients."""
