"""kvstore for vLLM: a KV connector whose cache lives in the kvstore daemon.

`connector.KVStoreConnector` is what vLLM loads; `scheduler` decides what is loaded and saved,
`worker` moves the bytes. Read `scheduler.py` first.
"""
