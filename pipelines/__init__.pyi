from .base import DiffusionPipeline as DiffusionPipeline
from .base import Pipeline as Pipeline
