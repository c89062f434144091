"""The mean of the buffers that training changes, such as BatchNorm's statistics (`buffers="average"`)."""

from __future__ import annotations

from torch import Tensor

from fastsam.fed.algorithms.base import Aggregate, Round
from fastsam.fed.stages.base import ClientUploads, Stage
from fastsam.fed.update.model_copy import Replica, move_buffers

BUFFERS = "model buffers"  # the name under which buffers enter the sums


class AverageBuffers(Stage):
    """Send the changes of the buffers with the uploads, and move the global model's buffers by their mean."""

    def process_uploads(self, uploads: ClientUploads, round: Round) -> None:
        """Add the changes of the buffers to the uploads."""
        if uploads.results.buffers is not None:
            uploads.mean[BUFFERS] = uploads.results.buffers

    def process_buffers(self, buffers: list[Tensor], aggregate: Aggregate) -> list[Tensor]:
        """Return the buffers plus the mean of the clients' changes."""
        return move_buffers(buffers, aggregate.mean(BUFFERS)) if buffers else buffers

    def traffic(self, model: Replica) -> tuple[int, int]:
        """Return the bytes of all buffers, for the download and for the upload."""
        nbytes = sum(b.nbytes for b in model.buffers)
        return nbytes, nbytes
