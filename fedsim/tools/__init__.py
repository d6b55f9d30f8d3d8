"""Tools beside the audit: training a generator, looking into position embeddings, and taking stock
of what a spec can name."""
