"""transformers: `load_model`, `swap_indexers`, a quantizer and an experts implementation.

Importing this module registers the last two with transformers, as `firesteel`. Nothing of
transformers is replaced.
"""

from firesteel.integrations.transformers.indexers import (
    IndexerReport,
    restore_indexers,
    swap_indexers,
)
from firesteel.integrations.transformers.load import firesteel_config, load_model, load_report
from firesteel.integrations.transformers.quantizer import FiresteelConfig, FiresteelQuantizer
from firesteel.integrations.transformers.report import LoadReport
from firesteel.modules.packed import PackedExperts, PackedLinear

__all__ = [
    "FiresteelConfig",
    "FiresteelQuantizer",
    "IndexerReport",
    "LoadReport",
    "PackedExperts",
    "PackedLinear",
    "firesteel_config",
    "load_model",
    "load_report",
    "restore_indexers",
    "swap_indexers",
]
