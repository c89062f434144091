"""The federated workload, and every program that is timed on it: ours, bare loops, and the simulators that a user could
pick instead."""
