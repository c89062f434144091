"""Accuracy of the variants of SAM on small tasks, at equal steps and at equal time, compared with SGD's."""
