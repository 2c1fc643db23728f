"""The kernel-alignment workflow: each step is one command, with a gate, and adds to one alignment.json."""
