"""What tests of the codec's kernels share."""

from __future__ import annotations

from kvstore_kernels import native

# It makes records when it is imported. On a plain checkout, as of `make gpu`, there may be no
# library; that there is one after an installation is test_native.py's.
collect_ignore = [] if native.library() is not None else ["test_hostile_records.py"]
