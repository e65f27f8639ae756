"""Errors of training. Each message is one sentence for whoever started the run."""


class TrainingError(RuntimeError):
    """The run cannot continue."""


class LostProcessError(TrainingError):
    """Another process of the run has ended."""


class FailedProcessError(TrainingError):
    """A launched process ended before the run was finished."""


class OutOfMemoryError(RuntimeError):
    """A batch does not fit in memory, whatever the chunk size."""


class NotFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite.

    Attributes:
        fact: what was found and at which step.
        images: the batch it happened on; empty where no single batch is to blame.
    """

    def __init__(self, fact: str, images: str = "") -> None:
        super().__init__(f"{fact}; the batch was images {images}" if images else fact)
        self.fact, self.images = fact, images
