"""The control plane's messages (`v1`, generated) and how errors travel in it (`status`)."""

RPC_VERSION = 1
