"""Experiments with the active server (threats F, G, H): what each manoeuvre gives it."""
