"""The client side: data sets, shards, local training and evaluation as a Flower ClientApp.

It alone touches private pictures; what it learned from goes into the vault.
"""

if __name__ != "fedsim.clients":
    raise ImportError("import fedsim.clients: it is a part of fedsim.", name=__name__)
