from .pipeline import QwenImagePipeline as QwenImagePipeline
