"""Tools beside the audit, one module each: `generators` trains one, `positions` looks into position
embeddings, `inventory` takes stock of what a spec can name."""
