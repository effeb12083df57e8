"""Quantised mixture-of-experts checkpoints, with the experts kept packed.

Importing this package imports neither Triton nor transformers and touches no GPU.
"""

import logging

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"

logging.getLogger(__name__).addHandler(logging.NullHandler())
