"""Tests, by what they need: unit, kernels, distributed learner ranks, real servers."""
