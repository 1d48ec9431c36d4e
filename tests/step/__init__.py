"""Tests of the device code of one step: sampler, packing, loads and what is compiled."""
