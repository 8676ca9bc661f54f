"""Copy streams and the marks that order them; on a machine without CUDA everything is in order
already and a mark is None."""

from contextlib import contextmanager, nullcontext

import torch

Mark = torch.cuda.Event | None


class CopyLane:
    """One direction of copies, beside the compute stream."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def running(self):
        """Context in which copies are issued on this lane."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def wait(self, mark: Mark) -> None:
        if self.stream and mark:
            self.stream.wait_event(mark)

    def mark(self) -> Mark:
        return self.stream.record_event() if self.stream else None

    def synchronize(self) -> None:
        if self.stream:
            self.stream.synchronize()


def compute_mark(device: torch.device) -> Mark:
    """A mark behind everything issued so far on the compute stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_waits(mark: Mark, device: torch.device) -> None:
    if mark:
        torch.cuda.current_stream(device).wait_event(mark)


@contextmanager
def quiet(device: torch.device):
    """Runs the body with no copy in flight before or after it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
