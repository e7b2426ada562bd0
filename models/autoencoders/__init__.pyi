from .asymmetric import AsymmetricAutoencoderKL as AsymmetricAutoencoderKL
from .kl import AutoencoderKL as AutoencoderKL
from .qwenimage import AutoencoderKLQwenImage as AutoencoderKLQwenImage
from .tiny import AutoencoderTiny as AutoencoderTiny
from .wan import AutoencoderKLWan as AutoencoderKLWan
