"""The one local step, our copy of the user's model over one flat row, FedRobust's map of the inputs, the order of
weights in memory."""
