"""Gradient matching: the search for images whose update is the one observed.

`base` turns a View into a `problem` and a `search`; a `matcher` differentiates the matching loss;
`objectives` and `priors` are its terms, `spaces` what is searched, `layers` what is looked at.
"""
