"""`make test-lmcache`: a real LMCache server over a daemon, both killed and stopped.

`server` starts LMCache's own server, `engine` talks to it as an engine's workers do, `course` is
what happens to them.
"""
