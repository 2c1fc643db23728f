"""Products of matrices on fixed tiles, for GPUs: the arithmetic under linear layers and slices."""
