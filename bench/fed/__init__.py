"""The federated workload, and every program that is timed on it: ours, bare loops, and other simulators."""
