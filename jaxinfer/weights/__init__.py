"""Checkpoints: where a model reference leads, lazy tensor handles, and the loader that places them."""
