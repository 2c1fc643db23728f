"""Every value-producing operator of the model, one function each; imports torch (and triton) only.

The CPU references fix the arithmetic: fp32 accumulation over shapes that depend on neither the batch nor its
packing. ``tiles.py`` holds the constants on which that rests.
"""
