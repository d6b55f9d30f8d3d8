"""The data sets, one file each, and what they share: pictures, trees of them, partitions."""

from fedsim.clients.data.datasets import DATASETS, dataset_names, known_as, load_images
from fedsim.clients.data.digests import digests_of, pixel_digest
from fedsim.clients.data.pictures import ImageSet, Loader, Split

__all__ = [
    "DATASETS",
    "ImageSet",
    "Loader",
    "Split",
    "dataset_names",
    "digests_of",
    "known_as",
    "load_images",
    "pixel_digest",
]
