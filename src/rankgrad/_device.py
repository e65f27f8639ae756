"""What a failed capture of a CUDA graph leaves behind, wherever graphs are captured."""

import torch


def forget_failed_capture(device: torch.device) -> None:
    """Lets torch draw random numbers again: its generator believes that the capture still goes on, and refuses."""
    torch.cuda.synchronize(device)
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())
