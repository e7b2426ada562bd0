from .autoencoders.asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .autoencoders.kl import AutoencoderKL as AutoencoderKL
from .autoencoders.tiny import AutoencoderTiny as AutoencoderTiny
from .base import Model as Model
from .base import ModelMixin as ModelMixin
