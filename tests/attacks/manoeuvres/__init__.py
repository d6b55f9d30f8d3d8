"""Tests of the manoeuvres, one file each."""
