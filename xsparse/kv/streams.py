"""Copy streams and the marks that order them; on a machine without CUDA everything is in order
already and a mark is None."""

from contextlib import nullcontext

import torch

Mark = torch.Event | None


class CopyLane:
    """One direction of copies, beside the compute stream.

    urgent: its kernels get the next free multiprocessors, before what waits on other streams
    """

    def __init__(self, device: torch.device, *, urgent: bool = False):
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def running(self):
        """Context in which copies are issued on this lane."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait(self, mark: Mark) -> None:
        if self.stream and mark:
            self.stream.wait_event(mark)

    def keeps(self, *tensors: torch.Tensor) -> None:
        """Memory of the compute stream that is not used again before this lane is done with it."""
        if self.stream:
            for t in tensors:
                t.record_stream(self.stream)

    def mark(self) -> Mark:
        return self.stream.record_event() if self.stream else None


class Buffer:
    """Device memory that a lane fills and the compute stream reads, in turns.

    data: any tensor; `loaded` is behind the last fill, `used` behind the last reader
    """

    def __init__(self, data: torch.Tensor):
        self.data = data
        self.loaded: Mark = None
        self.used: Mark = None


def compute_mark(device: torch.device) -> Mark:
    """A mark behind everything issued so far on the compute stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_waits(mark: Mark, device: torch.device) -> None:
    if mark:
        torch.cuda.current_stream(device).wait_event(mark)
