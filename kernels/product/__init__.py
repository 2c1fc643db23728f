"""Products of matrices on fixed tiles: the arithmetic under linear layers and slices on GPUs, under batches on CPUs."""
