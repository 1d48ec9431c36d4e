"""Comparison with the PyTorch reference, layer by layer and token by token; see session.py."""
