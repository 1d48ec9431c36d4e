"""Tests of the engine as a whole, on tiny checkpoints."""
