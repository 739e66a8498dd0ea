"""Messages of the control plane (`v1`) and of etcd, generated; how errors travel (`status`)."""

RPC_VERSION = 1
