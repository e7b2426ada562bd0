from .pipeline import AuraFlowPipeline as AuraFlowPipeline
