from .condition import LTXConditionPipeline as LTXConditionPipeline
from .condition import LTXVideoCondition as LTXVideoCondition
from .image2video import LTXImageToVideoPipeline as LTXImageToVideoPipeline
from .output import LTXPipelineOutput as LTXPipelineOutput
from .pipeline import LTXPipeline as LTXPipeline
