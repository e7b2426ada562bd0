from .pipeline import ZImagePipeline as ZImagePipeline
from .prompts import ZImagePipelineOutput as ZImagePipelineOutput
