"""What a model is made of, as a value that can be written to a file and read again."""

from dataclasses import dataclass

from rankgrad._checks import check_choice, check_count, check_positive

POOLS = ("auto", "gem", "avg", "max", "cls")
BATCH_NORMS = ("frozen", "fixed", "live")
PIXELS = ("native", "imagenet")


@dataclass(frozen=True)
class ModelSpec:
    """Trunk -> pool -> layer norm -> linear -> length 1; the defaults are the head of RS@k.

    Attributes:
        trunk: "convnet" (built in, small), a ResNet or GoogLeNet of torchvision, vit-b32, vit-b16, vit-s32, vit-s16, or any
            model of timm by its name; "timm/resnet50" asks for timm's where torchvision has the name too.
        weights: "none", "default" (ImageNet weights of torchvision or timm, downloaded once), or the path of a
            .safetensors, .pth or .pt file.
        pool: "gem", "avg", "max" over positions, "cls" for the class token; "auto" is cls where there is a class token,
            gem for feature maps, avg for tokens without one.
        gem_p: the exponent of GeM, at first or for good.
        gem_learned: whether the exponent is trained.
        l2_pooled: bring the pooled feature to length 1 before the linear layer, as the landmark models with learned
            whitening do.
        layer_norm: normalise the pooled feature, with trained scale and shift.
        dim: of the embedding; 0 leaves out the linear layer.
        batch_norm: "frozen" keeps the running statistics as they are and trains scale and shift, "fixed" keeps those too,
            "live" is the ordinary layer. Frozen suits pretrained weights; a trunk without any learns better "live".
        pixels: "native" normalises pixels as the trunk was trained, "imagenet" with the mean and deviation of ImageNet
            whatever the trunk is: RS@k did so for its ViTs.
    """

    trunk: str = "resnet50"
    weights: str = "none"
    pool: str = "auto"
    gem_p: float = 3.0
    gem_learned: bool = True
    l2_pooled: bool = False
    layer_norm: bool = True
    dim: int = 512
    batch_norm: str = "frozen"
    pixels: str = "native"

    def __post_init__(self) -> None:
        for name in ("trunk", "weights"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise TypeError(f"ModelSpec: {name} must be a string that is not empty, got {value!r}")
        check_choice(self.pool, POOLS, name="pool", caller="ModelSpec")
        check_choice(self.batch_norm, BATCH_NORMS, name="batch_norm", caller="ModelSpec")
        check_choice(self.pixels, PIXELS, name="pixels", caller="ModelSpec")
        check_positive(self.gem_p, name="gem_p", caller="ModelSpec")
        check_count(self.dim, name="dim", caller="ModelSpec", least=0)
        if self.layer_norm and self.l2_pooled:
            raise ValueError("ModelSpec: layer_norm undoes the length that l2_pooled gives; choose one of the two")
