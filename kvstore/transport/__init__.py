"""How bytes and nouns travel between processes: protobuf messages, and the arena's own socket."""
