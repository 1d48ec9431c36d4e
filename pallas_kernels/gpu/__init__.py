"""Kernels for NVIDIA GPUs (Hopper), written in Pallas' Mosaic GPU.

compat.py is the only file that touches unstable API. Importing a kernel imports Mosaic, which CPUs do
without: dispatch.py and ops.py import these files only where such a kernel is wanted.
"""
