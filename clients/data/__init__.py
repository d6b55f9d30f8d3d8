"""The data sets, one file each, and what they share: pictures, trees of them, partitions."""
