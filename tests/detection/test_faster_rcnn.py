"""The drop-in: of torchvision's detector one loss changes and nothing else."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor

from rankgrad.detection import DetectionAPLoss, draw_shapes
from rankgrad.detection.detector_training import DetectionBatches, uncollate
from rankgrad.detection.faster_rcnn import RESNETS, build_detector, use_classification_loss


def tiny(classes=5, **options):
    settings = {"min_size": 96, "max_size": 96, "anchor_scale": 4.0, "proposals": 100, "regions": 32, **options}
    return build_detector("tiny", classes, **settings)


@pytest.fixture(scope="module")
def given():
    """Images and targets of a few drawn scenes, one of them without objects."""
    scenes = draw_shapes("train", 60, size=96)
    empty = next(number for number, scene in enumerate(scenes.scenes) if not len(scene.labels))
    *_, batch, _ = next(DetectionBatches(scenes.select([0, 1, empty]), 3, flip=False).iterate(0))
    return uncollate(batch)


def losses_of(detector, given):
    with torch.random.fork_rng():
        torch.manual_seed(0)  # proposals and regions are sampled
        return detector.train()(*copy.deepcopy(given))


def test_only_the_classification_loss_changes(given):
    plain = tiny()
    ranked = copy.deepcopy(plain)
    use_classification_loss(ranked, DetectionAPLoss())
    before, after = losses_of(plain, given), losses_of(ranked, given)
    assert list(before) == list(after)
    for name in ("loss_box_reg", "loss_objectness", "loss_rpn_box_reg"):
        assert torch.equal(before[name], after[name])
    assert not torch.equal(before["loss_classifier"], after["loss_classifier"])
    assert 0 < float(after["loss_classifier"].detach()) < 1


def test_cross_entropy_put_in_gives_the_same_training_as_torchvision(given):
    plain = tiny()
    same = copy.deepcopy(plain)
    use_classification_loss(same, F.cross_entropy)
    gradients = []
    for detector in (plain, same):
        sum(losses_of(detector, given).values()).backward()
        gradients.append({name: parameter.grad for name, parameter in detector.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_inference_is_torchvisions(given):
    plain = tiny(score_threshold=0.0)
    ranked = copy.deepcopy(plain)
    use_classification_loss(ranked, DetectionAPLoss())
    with torch.no_grad():
        pairs = list(zip(plain.eval()(given[0]), ranked.eval()(given[0]), strict=True))
    assert sum(len(before["boxes"]) for before, _ in pairs) > 0
    for before, after in pairs:
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_gradient_of_the_ap_loss_reaches_the_whole_network(given):
    detector = tiny()
    use_classification_loss(detector, DetectionAPLoss())
    losses_of(detector, given)["loss_classifier"].backward()
    for name, parameter in detector.named_parameters():
        if "rpn" not in name and "bbox_pred" not in name and "fpn" not in name:
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
        elif "rpn" in name or "bbox_pred" in name:
            assert parameter.grad is None or not parameter.grad.any(), name


def test_the_memory_is_in_the_detectors_state_and_fills_as_it_trains(given):
    detector = tiny()
    use_classification_loss(detector, DetectionAPLoss(memory=2))
    for _ in range(3):
        losses_of(detector, given)
    loss = detector.roi_heads.classification_loss
    assert len(loss.classes.past) == 2
    other = tiny()
    use_classification_loss(other, DetectionAPLoss(memory=2))
    other.load_state_dict(detector.state_dict())
    assert torch.equal(other.roi_heads.classification_loss.classes.past[0][0], loss.classes.past[0][0])


def test_a_predictor_exchanged_later_is_the_one_that_is_heard(given):
    detector = tiny()
    use_classification_loss(detector, DetectionAPLoss())
    detector.roi_heads.box_predictor = FastRCNNPredictor(256, 10)
    losses_of(detector, given)
    assert detector.roi_heads.classification_loss.classes.past[0][0].shape[0] == 9


def test_mask_rcnn_keeps_its_masks(given):
    images, targets = given
    body = tiny().backbone
    detector = MaskRCNN(body, num_classes=6, min_size=96, max_size=96)
    use_classification_loss(detector, DetectionAPLoss())
    targets = [{**t, "masks": torch.ones(len(t["labels"]), 96, 96, dtype=torch.uint8)} for t in targets]
    losses = losses_of(detector, (images, targets))
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"}


def test_what_is_no_detector_is_refused():
    with pytest.raises(TypeError, match="detector must have torchvision's roi_heads, as Faster R-CNN has, got Linear"):
        use_classification_loss(nn.Linear(1, 1), DetectionAPLoss())
    with pytest.raises(TypeError, match="loss must be a function of logits and targets, got str"):
        use_classification_loss(tiny(), "ap")


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "resnext101_32x4d"])
def test_the_papers_backbones_have_the_shapes_of_published_weights(name):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        ours = RESNETS[name].build(nn.BatchNorm2d).state_dict()
        theirs = timm.create_model(name, pretrained=False).state_dict()
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}


def test_weights_of_a_file_are_loaded_and_the_first_stages_stay(tmp_path):
    source = RESNETS["resnet18"].build(nn.BatchNorm2d)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "weights.pth")
    detector = build_detector("resnet18", 3, weights=str(tmp_path / "weights.pth"), min_size=64, max_size=64)
    body = detector.backbone.body
    assert torch.equal(body.layer3[1].conv2.weight, source.layer3[1].conv2.weight)
    trained = {name.split(".")[0] for name, parameter in body.named_parameters() if parameter.requires_grad}
    assert trained == {"layer2", "layer3", "layer4"}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in detector.modules())
    scratch = build_detector("resnet18", 3, min_size=64, max_size=64)
    assert all(parameter.requires_grad for parameter in scratch.parameters())


def test_the_network_is_a_function_of_the_seed_and_leaves_torchs_generator_alone():
    state = torch.get_rng_state()
    first, again, other = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    weight = "roi_heads.box_predictor.cls_score.weight"
    assert torch.equal(first.state_dict()[weight], again.state_dict()[weight])
    assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="backbone must be one of 'tiny', 'resnet18'"):
        build_detector("vgg16")
    with pytest.raises(ValueError, match="the backbone 'tiny' has no weights"):
        build_detector("tiny", weights="default")
    with pytest.raises(ValueError, match="torchvision has no weights of resnext101_32x4d: pass a file"):
        build_detector("resnext101_32x4d", weights="default")
    with pytest.raises(FileNotFoundError, match=r"the weights file '.*none\.pth' does not exist"):
        build_detector("resnet18", weights=str(tmp_path / "none.pth"))
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth does not fit trunk resnet18"):
        build_detector("resnet18", weights=str(tmp_path / "other.pth"))
