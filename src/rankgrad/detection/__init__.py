"""The AP loss in a detector: the loss alone, torchvision's Faster R-CNN with it, Pascal VOC, AP50.

    loss = DetectionAPLoss()
    loss(logits, targets)                               # in any detector, in place of cross-entropy

    from rankgrad.detection.faster_rcnn import build_detector, use_classification_loss
    detector = build_detector("resnet50", classes=20)   # torchvision's
    use_classification_loss(detector, loss)             # only its classification loss has changed

    rankgrad detect train voc07-r50-rambo --data DIR

The loss, the reader and AP need torch and numpy; detectors and images need: pip install 'rankgrad[train]'.
"""

from rankgrad.detection.box_evaluation import DetectionResult, Detections, evaluate_boxes
from rankgrad.detection.loss import DetectionAPLoss
from rankgrad.detection.scenes import Scene, Scenes
from rankgrad.detection.shapes import draw_shapes
from rankgrad.detection.voc import VOC_CLASSES, read_voc

__all__ = [
    "VOC_CLASSES",
    "DetectionAPLoss",
    "DetectionResult",
    "Detections",
    "Scene",
    "Scenes",
    "draw_shapes",
    "evaluate_boxes",
    "read_voc",
]
