"""A detector as a model of the training loop: one row of numbers per image, and a loss of all rows.

A row holds what the losses of an image need: the detector's own losses of boxes and proposals, and logits and targets of the
regions sampled in it. The AP loss thus ranks the regions of the whole batch, however few images go through the network at
once, and journal, checkpoints, resuming and large batches are those of `rankgrad.train`.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN

from rankgrad._checks import check_count
from rankgrad.data.prefetch import prefetch
from rankgrad.data.seeds import bits, generator, permutation
from rankgrad.detection.box_evaluation import Detections
from rankgrad.detection.faster_rcnn import ClassificationLoss, use_classification_loss
from rankgrad.detection.scenes import Scenes
from rankgrad.losses.average_precision import AveragePrecision
from rankgrad.losses.rank_loss import RankLoss
from rankgrad.ops.exact_rankers import Exact

# losses that remain torchvision's
OTHERS = ("loss_objectness", "loss_rpn_box_reg", "loss_box_reg")
# batches decoded ahead
AHEAD = 2
IGNORED = -1
"""Target of padding."""


class LossRecorder:
    """Takes the place of the classification loss and records its inputs."""

    logits: Tensor
    targets: Tensor

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.logits, self.targets = logits, targets
        return logits.new_zeros(())


class RowDetector(nn.Module):
    """Maps a batch of `DetectionBatches` to rows [images, 3 + regions x (2 + classes)] of regions and losses.

    Args:
        detector: of torchvision; its classification loss is replaced.
    """

    def __init__(self, detector: FasterRCNN) -> None:
        super().__init__()
        self.detector = detector
        self._recorder = LossRecorder()
        use_classification_loss(detector, self._recorder)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        images, targets = uncollate(batch)
        losses = self.detector(images, targets)
        logits, labels = self._recorder.logits.float(), self._recorder.targets
        del self._recorder.logits, self._recorder.targets
        most: int = self.detector.roi_heads.fg_bg_sampler.batch_size_per_image
        # the row of a region does not matter: the loss sees those of all images
        spare = len(images) * most - len(logits)
        columns = torch.cat((F.pad(labels, (0, spare), value=IGNORED)[:, None], F.pad(logits, (0, 0, 0, spare))), dim=1)
        others = torch.stack([losses[name].float() for name in OTHERS])
        return torch.cat((others.expand(len(images), -1), columns.view(len(images), -1)), dim=1)


class DetectionObjective(nn.Module):
    """The total loss of a detector, from the rows of a `RowDetector`.

    Args:
        loss: of logits and targets, such as `DetectionAPLoss()` or torch's `cross_entropy`.
        classes: number of classes, without background.
    """

    def __init__(self, loss: ClassificationLoss, classes: int) -> None:
        super().__init__()
        self.classification_loss, self.classes = loss, classes
        self._exact = RankLoss(Exact(), AveragePrecision())
        self._parts: dict[str, Tensor] = {}

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        others = rows[:, : len(OTHERS)].mean(dim=0)
        logits, targets = self._regions(rows)
        classification = self.classification_loss(logits, targets)
        self._parts = {"loss_classifier": classification.detach()}
        self._parts |= dict(zip(OTHERS, others.detach(), strict=True))
        return classification + others.sum()

    def diagnose(self, rows: Tensor, labels: Tensor) -> dict[str, float]:
        """Terms of the last loss, and the exact AP of the sampled regions, without margin or memory."""
        logits, targets = self._regions(rows.detach())
        scores = logits.softmax(dim=1)[:, 1:].t()
        relevant = targets == torch.arange(1, self.classes + 1, device=targets.device)[:, None]
        numbers = {name: float(value) for name, value in self._parts.items()}
        numbers["regions"] = float(len(targets))
        numbers["positives"] = float((targets > 0).sum())
        if numbers["positives"]:
            numbers["batch_mAP"] = 1 - float(self._exact.from_scores(scores, relevant))
        return numbers

    def _regions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        columns = rows[:, len(OTHERS) :].reshape(-1, 2 + self.classes)
        valid = columns[:, 0] != IGNORED
        return columns[valid, 1:], columns[valid, 0].detach().long()


class DetectionBatches:
    """Batches of images with their boxes, shuffled every epoch and mirrored at random.

    Step s of epoch e is a function of (seed, e, s).

    Args:
        scenes: the images.
        batch_size: images in a batch; the last one of an epoch may be smaller.
        seed: seed of order and mirroring.
        flip: mirror images with probability 1/2.
        difficult: include objects that are marked as difficult.
        workers: number of decoding threads.
    """

    def __init__(
        self,
        scenes: Scenes,
        batch_size: int,
        *,
        seed: int = 0,
        flip: bool = True,
        difficult: bool = False,
        workers: int = 2,
    ) -> None:
        check_count(batch_size, name="batch_size", caller="DetectionBatches")
        check_count(workers, name="workers", caller="DetectionBatches")
        self.scenes, self.batch_size, self.seed = scenes, batch_size, seed
        self.flip, self.difficult, self.workers = flip, difficult, workers
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration."""
        check_count(epoch, name="epoch", caller="DetectionBatches.set_epoch", least=0)
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.scenes) / self.batch_size)

    def iterate(self, start: int) -> Iterator[tuple[int, Tensor, dict[str, Tensor], Tensor]]:
        """Yield (step, numbers of the images, batch, objects per image), from step `start` on."""
        check_count(start, name="start", caller="DetectionBatches.iterate", least=0)
        order = permutation(len(self.scenes), bits(self.seed, "detection order", self.epoch))
        epoch = self.epoch

        def make(step: int) -> tuple[int, Tensor, dict[str, Tensor], Tensor]:
            numbers = order[step * self.batch_size : (step + 1) * self.batch_size]
            mirrored = torch.rand(len(numbers), generator=generator(self.seed, "detection flip", epoch, step)) < 0.5
            items = [self._item(int(i), bool(m) and self.flip) for i, m in zip(numbers, mirrored, strict=True)]
            batch = collate(items)
            return step, torch.from_numpy(numbers), batch, (batch["labels"] > 0).sum(dim=1)

        steps = range(start, len(self))
        return (batch for _, batch in prefetch(make, steps, threads=self.workers, ahead=AHEAD + self.workers))

    def _item(self, number: int, mirrored: bool) -> tuple[Tensor, Tensor, Tensor]:
        scene = self.scenes.scenes[number] if self.difficult else self.scenes.scenes[number].clear
        image, boxes = self.scenes.image(number), torch.from_numpy(scene.boxes.copy())
        if mirrored:
            image = image.flip(2)
            boxes[:, [0, 2]] = scene.width - boxes[:, [2, 0]]
        return image, boxes, torch.from_numpy(scene.labels)


def collate(items: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
    """Stack images, boxes and labels, padded, with a row per image."""
    height, width = (max(image.shape[axis] for image, _, _ in items) for axis in (1, 2))
    most = max(len(labels) for _, _, labels in items)
    batch = {
        "images": torch.zeros(len(items), 3, height, width, dtype=torch.uint8),
        "sizes": torch.tensor([image.shape[1:] for image, _, _ in items]),
        "boxes": torch.zeros(len(items), most, 4),
        "labels": torch.full((len(items), most), IGNORED),
    }
    for row, (image, boxes, labels) in enumerate(items):
        batch["images"][row, :, : image.shape[1], : image.shape[2]] = image
        batch["boxes"][row, : len(labels)] = boxes
        batch["labels"][row, : len(labels)] = labels
    return batch


def uncollate(batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images and targets for torchvision's detectors: pixels in [0, 1], no padding."""
    images = [
        image[:, :height, :width].float() / 255
        for image, (height, width) in zip(batch["images"], batch["sizes"].tolist(), strict=True)
    ]
    targets = []
    for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True):
        valid = labels != IGNORED
        targets.append({"boxes": boxes[valid], "labels": labels[valid]})
    return images, targets


@torch.no_grad()
def detect(
    detector: FasterRCNN,
    scenes: Scenes,
    *,
    device: torch.device,
    batch_size: int = 8,
    workers: int = 2,
    autocast: torch.dtype | None = None,
    each: Callable[[int], None] | None = None,
) -> list[Detections]:
    """Detections in every image, in the order of the images.

    Args:
        detector: of torchvision; in evaluation mode during the call.
        scenes: the images.
        device: of the detector.
        batch_size: images at once.
        workers: number of decoding threads.
        autocast: dtype of autocast, None for none.
        each: called with the number of images after each batch.
    """
    was_training = detector.training
    detector.eval()
    found: list[Detections] = []

    def load(step: int) -> list[Tensor]:
        last = min((step + 1) * batch_size, len(scenes))
        return [scenes.image(number) for number in range(step * batch_size, last)]

    try:
        steps = range(math.ceil(len(scenes) / batch_size))
        for _, images in prefetch(load, steps, threads=workers, ahead=AHEAD + workers):
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                outputs = detector([image.to(device, non_blocking=True).float() / 255 for image in images])
            found += [_detections(output) for output in outputs]
            if each is not None:
                each(len(images))
    finally:
        detector.train(was_training)
    return found


def _detections(output: Mapping[str, Tensor]) -> Detections:
    boxes, scores = (output[name].float().cpu().numpy().astype(np.float32) for name in ("boxes", "scores"))
    return Detections(boxes, output["labels"].cpu().numpy().astype(np.int64), scores)
