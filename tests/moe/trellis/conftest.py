"""Where Triton has no such Gluon there are no kernels to test."""

from firesteel.moe.products import HOPPER

collect_ignore_glob = [] if HOPPER else ["test_*.py"]
