from .autoencoders.kl import AutoencoderKL as AutoencoderKL
