"""Captures: the federation of somebody's own Flower app, kept so that it can be audited.

In their server the `strategy` keeps what it sends and receives, in their clients the `witness`
keeps what they learn from; neither changes a byte of it. Afterwards the `settling` of a capture
makes a run of it like any other, and `binding` brings the witnesses' truths to its observations.
"""
