"""The local update rule, the layout of a flat row, copies of the model over a row, and the memory format of weights."""
