from .autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .autoencoders.kl import AutoencoderKL as AutoencoderKL
from .autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .auto import AutoModel as AutoModel
from .base import Model as Model
from .base import ModelMixin as ModelMixin
from .unets.unet_2d_condition import UNet2DConditionModel as UNet2DConditionModel
from .unets.unet_2d import UNet2DModel as UNet2DModel
