"""timm's batch norm with activation, with frozen statistics. Apart from `frozen_norm`, because it loads timm."""

from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor

from rankgrad.models.frozen_norm import frozen_norm, is_faster


class FrozenBatchNormAct2d(BatchNormAct2d):
    """timm's layer, as `FrozenBatchNorm2d` is torch's."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(frozen_norm(self, x))) if is_faster(self, x) else super().forward(x)
        return y
