"""Coded records: the bytes of a block of KV in fewer bytes, exact (L3) or lossy (EP).

`record` is the format, `places` tells where in an engine's memory a record's values lie,
`reference` computes every form slowly in numpy, and `coder` does it by the native library.
"""
