from .asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .kl import AutoencoderKL as AutoencoderKL
from .tiny import AutoencoderTiny as AutoencoderTiny
