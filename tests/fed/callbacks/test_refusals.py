"""Callbacks that cannot be made, and in which words."""

from fastsam.fed.callbacks import EarlyStopping, SaveBest
from tests.helpers.fed_refusals import refusals

test_refused = refusals(
    # bad options
    (lambda: EarlyStopping("sharpness"), "mode must be 'min' or 'max': the name 'sharpness' does not say"),
    (lambda: EarlyStopping("test_loss", mode="down"), "mode must be one of 'min', 'max', got 'down'"),
    (lambda: EarlyStopping(patience=0), "patience must be an integer >= 1, got 0"),
    (lambda: EarlyStopping(min_delta=-1), "min_delta must be a finite number >= 0"),
    (lambda: EarlyStopping(5), "metric must be a key of a round's record such as 'test_accuracy', got 5"),
    (lambda: SaveBest("."), "path must be a file such as best.safetensors, got a directory"),
)
