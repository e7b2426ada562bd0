from .unet_2d import UNet2DModel as UNet2DModel
from .unet_2d_condition import UNet2DConditionModel as UNet2DConditionModel
