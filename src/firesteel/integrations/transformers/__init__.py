"""transformers: `load_model`, the quantizer `firesteel` and the experts implementation `firesteel`.

Importing this module registers both with transformers. Nothing of transformers is replaced.
"""

from firesteel.integrations.transformers.load import firesteel_config, load_model, load_report
from firesteel.integrations.transformers.modules import PackedExperts, PackedLinear
from firesteel.integrations.transformers.quantizer import FiresteelConfig, FiresteelQuantizer
from firesteel.integrations.transformers.report import LoadReport

__all__ = [
    "FiresteelConfig",
    "FiresteelQuantizer",
    "LoadReport",
    "PackedExperts",
    "PackedLinear",
    "firesteel_config",
    "load_model",
    "load_report",
]
