"""The paged indexer: which keys each row's sparse attention reads, exact and deterministic.

Three operations, which `firesteel.launch` plans, prewarms and binds: `PageWriterSpec`, `DecodeSpec`
and `PrefillSpec`. See docs/indexer.md.
"""

from firesteel.indexer.pages import HEAD_SIZE, PAGE_TOKENS, page_bytes, read_keys, write_keys
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.indexer.torch_backend import round_to_e4m3

__all__ = [
    "HEAD_SIZE",
    "PAGE_TOKENS",
    "DecodeSpec",
    "PageWriterSpec",
    "PrefillSpec",
    "page_bytes",
    "read_keys",
    "round_to_e4m3",
    "write_keys",
]
