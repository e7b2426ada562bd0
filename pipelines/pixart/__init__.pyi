from .pipeline import PixArtAlphaPipeline as PixArtAlphaPipeline
from .pipeline import PixArtSigmaPipeline as PixArtSigmaPipeline
