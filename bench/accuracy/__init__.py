"""What the variants of SAM are worth: accuracy on small tasks, at equal steps and at equal time, beside SGD's."""
