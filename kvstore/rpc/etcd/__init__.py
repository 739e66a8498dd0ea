"""Messages of etcd's API, generated. See the .proto for what is left out."""
