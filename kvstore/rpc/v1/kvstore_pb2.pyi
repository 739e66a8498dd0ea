from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AddTenantRequest(_message.Message):
    __slots__ = ("name", "assignments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    assignments: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., assignments: _Optional[_Iterable[str]] = ...) -> None: ...

class AddTenantReply(_message.Message):
    __slots__ = ("socket",)
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    socket: str
    def __init__(self, socket: _Optional[str] = ...) -> None: ...

class DeleteTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTenantReply(_message.Message):
    __slots__ = ("blocks", "erased", "left")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERASED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    erased: str
    left: str
    def __init__(self, blocks: _Optional[int] = ..., erased: _Optional[str] = ..., left: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("rpc_version", "token", "client", "engines")
    RPC_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    rpc_version: int
    token: str
    client: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rpc_version: _Optional[int] = ..., token: _Optional[str] = ..., client: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session", "instance", "arena_socket", "batch_keys_max", "server_version", "call_socket", "node", "announces")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ARENA_SOCKET_FIELD_NUMBER: _ClassVar[int]
    BATCH_KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CALL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCES_FIELD_NUMBER: _ClassVar[int]
    session: int
    instance: str
    arena_socket: str
    batch_keys_max: int
    server_version: str
    call_socket: str
    node: str
    announces: bool
    def __init__(self, session: _Optional[int] = ..., instance: _Optional[str] = ..., arena_socket: _Optional[str] = ..., batch_keys_max: _Optional[int] = ..., server_version: _Optional[str] = ..., call_socket: _Optional[str] = ..., node: _Optional[str] = ..., announces: _Optional[bool] = ...) -> None: ...

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("spec_json", "name")
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    name: str
    def __init__(self, spec_json: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RegisterNamespaceReply(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("group", "shard", "begin", "end")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    group: int
    shard: int
    begin: int
    end: int
    def __init__(self, group: _Optional[int] = ..., shard: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "skip_blocks", "recompute_s_per_block", "refined", "fleet", "each", "spans")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REFINED_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    skip_blocks: int
    recompute_s_per_block: float
    refined: bool
    fleet: bool
    each: bool
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., skip_blocks: _Optional[int] = ..., recompute_s_per_block: _Optional[float] = ..., refined: _Optional[bool] = ..., fleet: _Optional[bool] = ..., each: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("node", "address", "engines", "blocks", "age_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    blocks: int
    age_s: float
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ..., blocks: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("hit_blocks", "resident_blocks", "worth_blocks", "load_s", "holders", "present")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    resident_blocks: int
    worth_blocks: int
    load_s: float
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    present: bytes
    def __init__(self, hit_blocks: _Optional[int] = ..., resident_blocks: _Optional[int] = ..., worth_blocks: _Optional[int] = ..., load_s: _Optional[float] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., present: _Optional[bytes] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session", "namespace_id", "keys", "skip_blocks", "readers", "wait_s", "spans", "request_id", "recompute_s_per_block", "session_id", "file_places", "refined", "origin", "early", "tokens", "lora_name", "each")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_S_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_PLACES_FIELD_NUMBER: _ClassVar[int]
    REFINED_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace_id: bytes
    keys: bytes
    skip_blocks: int
    readers: int
    wait_s: float
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    request_id: str
    recompute_s_per_block: float
    session_id: str
    file_places: bool
    refined: bool
    origin: Origin
    early: bool
    tokens: bytes
    lora_name: str
    each: bool
    def __init__(self, session: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., skip_blocks: _Optional[int] = ..., readers: _Optional[int] = ..., wait_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., request_id: _Optional[str] = ..., recompute_s_per_block: _Optional[float] = ..., session_id: _Optional[str] = ..., file_places: _Optional[bool] = ..., refined: _Optional[bool] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., early: _Optional[bool] = ..., tokens: _Optional[bytes] = ..., lora_name: _Optional[str] = ..., each: _Optional[bool] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("source", "expect_blocks")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EXPECT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    source: str
    expect_blocks: int
    def __init__(self, source: _Optional[str] = ..., expect_blocks: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "namespace_id", "keys", "first_block", "parent", "spans", "wait_s", "session_id", "nbytes", "refined", "tokens", "lora_name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    REFINED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace_id: bytes
    keys: bytes
    first_block: int
    parent: bytes
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    wait_s: float
    session_id: str
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    refined: bool
    tokens: bytes
    lora_name: str
    def __init__(self, session: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parent: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., wait_s: _Optional[float] = ..., session_id: _Optional[str] = ..., nbytes: _Optional[_Iterable[int]] = ..., refined: _Optional[bool] = ..., tokens: _Optional[bytes] = ..., lora_name: _Optional[str] = ...) -> None: ...

class GrantReply(_message.Message):
    __slots__ = ("lease", "deadline_s", "spans", "extents", "offsets", "checksums", "hit_blocks", "leased", "refused", "files", "place_files", "place_offsets", "nbytes", "ready_blocks", "present")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FILES_FIELD_NUMBER: _ClassVar[int]
    PLACE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    deadline_s: float
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    extents: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    hit_blocks: int
    leased: bool
    refused: int
    files: _containers.RepeatedScalarFieldContainer[str]
    place_files: _containers.RepeatedScalarFieldContainer[int]
    place_offsets: _containers.RepeatedScalarFieldContainer[int]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    ready_blocks: int
    present: bytes
    def __init__(self, lease: _Optional[int] = ..., deadline_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., extents: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., hit_blocks: _Optional[int] = ..., leased: _Optional[bool] = ..., refused: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., place_files: _Optional[_Iterable[int]] = ..., place_offsets: _Optional[_Iterable[int]] = ..., nbytes: _Optional[_Iterable[int]] = ..., ready_blocks: _Optional[int] = ..., present: _Optional[bytes] = ...) -> None: ...

class AwaitRequest(_message.Message):
    __slots__ = ("session", "lease", "blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: int
    lease: int
    blocks: int
    def __init__(self, session: _Optional[int] = ..., lease: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class AwaitReply(_message.Message):
    __slots__ = ("ready_blocks", "over", "given_up")
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    ready_blocks: int
    over: bool
    given_up: bool
    def __init__(self, ready_blocks: _Optional[int] = ..., over: _Optional[bool] = ..., given_up: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "lease", "checksums", "durable")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    session: int
    lease: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    durable: bool
    def __init__(self, session: _Optional[int] = ..., lease: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., durable: _Optional[bool] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("committed", "existing", "refused", "durable")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    committed: int
    existing: int
    refused: int
    durable: bool
    def __init__(self, committed: _Optional[int] = ..., existing: _Optional[int] = ..., refused: _Optional[int] = ..., durable: _Optional[bool] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "leases")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    session: int
    leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., leases: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, held: _Optional[_Iterable[bool]] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("namespace_id", "keys", "first_block", "parent", "group", "shard", "checksums", "durable", "wait_s", "tokens", "lora_name")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    first_block: int
    parent: bytes
    group: int
    shard: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    durable: bool
    wait_s: float
    tokens: bytes
    lora_name: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., first_block: _Optional[int] = ..., parent: _Optional[bytes] = ..., group: _Optional[int] = ..., shard: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., durable: _Optional[bool] = ..., wait_s: _Optional[float] = ..., tokens: _Optional[bytes] = ..., lora_name: _Optional[str] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "group", "shard", "wait_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    group: int
    shard: int
    wait_s: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., group: _Optional[int] = ..., shard: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("found", "checksums", "record_nbytes")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    RECORD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    record_nbytes: int
    def __init__(self, found: _Optional[_Iterable[bool]] = ..., checksums: _Optional[_Iterable[int]] = ..., record_nbytes: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "corrupt", "this_daemon_only")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    THIS_DAEMON_ONLY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    corrupt: bool
    this_daemon_only: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., corrupt: _Optional[bool] = ..., this_daemon_only: _Optional[bool] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace_id", "this_daemon_only")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    THIS_DAEMON_ONLY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    this_daemon_only: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., this_daemon_only: _Optional[bool] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("wait_s",)
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    def __init__(self, wait_s: _Optional[float] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("durable",)
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    durable: bool
    def __init__(self, durable: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("namespace_id", "after", "limit")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    after: bytes
    limit: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., after: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ScanItem(_message.Message):
    __slots__ = ("key", "namespace_id", "block", "nbytes", "resident", "durable")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    namespace_id: bytes
    block: int
    nbytes: int
    resident: bool
    durable: bool
    def __init__(self, key: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., block: _Optional[int] = ..., nbytes: _Optional[int] = ..., resident: _Optional[bool] = ..., durable: _Optional[bool] = ...) -> None: ...

class ScanReply(_message.Message):
    __slots__ = ("items", "next")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScanItem]
    next: bytes
    def __init__(self, items: _Optional[_Iterable[_Union[ScanItem, _Mapping]]] = ..., next: _Optional[bytes] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    def __init__(self, after: _Optional[bytes] = ...) -> None: ...

class NamespaceItem(_message.Message):
    __slots__ = ("namespace_id", "spec_json", "blocks", "model", "dram_bytes", "file_bytes", "asked_blocks", "hit_blocks", "tier_hit_blocks")
    class TierHitBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    spec_json: str
    blocks: int
    model: str
    dram_bytes: int
    file_bytes: int
    asked_blocks: int
    hit_blocks: int
    tier_hit_blocks: _containers.ScalarMap[str, int]
    def __init__(self, namespace_id: _Optional[bytes] = ..., spec_json: _Optional[str] = ..., blocks: _Optional[int] = ..., model: _Optional[str] = ..., dram_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., asked_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., tier_hit_blocks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("items", "next")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[NamespaceItem]
    next: bytes
    def __init__(self, items: _Optional[_Iterable[_Union[NamespaceItem, _Mapping]]] = ..., next: _Optional[bytes] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("reason", "block", "group", "left_s", "differs")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    block: int
    group: str
    left_s: float
    differs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reason: _Optional[str] = ..., block: _Optional[int] = ..., group: _Optional[str] = ..., left_s: _Optional[float] = ..., differs: _Optional[_Iterable[str]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("request_id", "client", "namespace_id", "asked_blocks", "skip_blocks", "hit_blocks", "file_blocks", "took_s", "ending", "asks", "age_s", "lease", "object_blocks", "base_blocks", "peer_blocks", "peer", "pool_blocks", "last_key", "session_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BASE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    client: str
    namespace_id: bytes
    asked_blocks: int
    skip_blocks: int
    hit_blocks: int
    file_blocks: int
    took_s: float
    ending: Ending
    asks: int
    age_s: float
    lease: str
    object_blocks: int
    base_blocks: int
    peer_blocks: int
    peer: str
    pool_blocks: int
    last_key: bytes
    session_id: str
    def __init__(self, request_id: _Optional[str] = ..., client: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., asked_blocks: _Optional[int] = ..., skip_blocks: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., file_blocks: _Optional[int] = ..., took_s: _Optional[float] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ..., asks: _Optional[int] = ..., age_s: _Optional[float] = ..., lease: _Optional[str] = ..., object_blocks: _Optional[int] = ..., base_blocks: _Optional[int] = ..., peer_blocks: _Optional[int] = ..., peer: _Optional[str] = ..., pool_blocks: _Optional[int] = ..., last_key: _Optional[bytes] = ..., session_id: _Optional[str] = ...) -> None: ...

class OutcomesRequest(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class OutcomesReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class BlockRange(_message.Message):
    __slots__ = ("begin", "end", "dram", "file", "reason", "left_s")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    dram: bool
    file: bool
    reason: str
    left_s: float
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., dram: _Optional[bool] = ..., file: _Optional[bool] = ..., reason: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("ranges", "hit_blocks", "resident_blocks", "ending")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[BlockRange]
    hit_blocks: int
    resident_blocks: int
    ending: Ending
    def __init__(self, ranges: _Optional[_Iterable[_Union[BlockRange, _Mapping]]] = ..., hit_blocks: _Optional[int] = ..., resident_blocks: _Optional[int] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("share", "block", "namespace_id")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    share: float
    block: int
    namespace_id: bytes
    def __init__(self, share: _Optional[float] = ..., block: _Optional[int] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class Lookup(_message.Message):
    __slots__ = ("at", "session", "namespace_id", "keys", "hit_blocks", "request_id", "block_tokens", "block_nbytes", "session_id")
    AT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NBYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    at: float
    session: int
    namespace_id: bytes
    keys: bytes
    hit_blocks: int
    request_id: str
    block_tokens: int
    block_nbytes: int
    session_id: str
    def __init__(self, at: _Optional[float] = ..., session: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., hit_blocks: _Optional[int] = ..., request_id: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_nbytes: _Optional[int] = ..., session_id: _Optional[str] = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("lookups", "dropped")
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    lookups: _containers.RepeatedCompositeFieldContainer[Lookup]
    dropped: int
    def __init__(self, lookups: _Optional[_Iterable[_Union[Lookup, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("step_s", "since")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    step_s: int
    since: float
    def __init__(self, step_s: _Optional[int] = ..., since: _Optional[float] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("at", "seconds", "values")
    AT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    at: float
    seconds: float
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[float] = ..., seconds: _Optional[float] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("columns", "samples")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("namespace_id", "prefix", "through", "depth", "limit", "cursor")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    prefix: bytes
    through: bytes
    depth: int
    limit: int
    cursor: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., prefix: _Optional[bytes] = ..., through: _Optional[bytes] = ..., depth: _Optional[int] = ..., limit: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class PrefixRun(_message.Message):
    __slots__ = ("parent", "first_key", "last_key", "namespace", "begin", "end", "children", "dram_bytes", "file_bytes", "blocks", "all_dram_bytes", "all_file_bytes", "hits", "used_age_s")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ALL_DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALL_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    USED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    parent: int
    first_key: bytes
    last_key: bytes
    namespace: int
    begin: int
    end: int
    children: int
    dram_bytes: int
    file_bytes: int
    blocks: int
    all_dram_bytes: int
    all_file_bytes: int
    hits: int
    used_age_s: float
    def __init__(self, parent: _Optional[int] = ..., first_key: _Optional[bytes] = ..., last_key: _Optional[bytes] = ..., namespace: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., children: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., all_dram_bytes: _Optional[int] = ..., all_file_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., used_age_s: _Optional[float] = ...) -> None: ...

class TreeReply(_message.Message):
    __slots__ = ("runs", "namespaces", "next", "age_s", "blocks", "left_out_blocks")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PrefixRun]
    namespaces: _containers.RepeatedScalarFieldContainer[bytes]
    next: bytes
    age_s: float
    blocks: int
    left_out_blocks: int
    def __init__(self, runs: _Optional[_Iterable[_Union[PrefixRun, _Mapping]]] = ..., namespaces: _Optional[_Iterable[bytes]] = ..., next: _Optional[bytes] = ..., age_s: _Optional[float] = ..., blocks: _Optional[int] = ..., left_out_blocks: _Optional[int] = ...) -> None: ...

class ConversationsRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "limit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    limit: int
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ConversationItem(_message.Message):
    __slots__ = ("session_id", "namespace_id", "blocks", "last_key", "age_s", "ended", "expected_in_s", "pinned_s", "pin_bytes_max")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_IN_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_S_FIELD_NUMBER: _ClassVar[int]
    PIN_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    blocks: int
    last_key: bytes
    age_s: float
    ended: bool
    expected_in_s: float
    pinned_s: float
    pin_bytes_max: int
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., blocks: _Optional[int] = ..., last_key: _Optional[bytes] = ..., age_s: _Optional[float] = ..., ended: _Optional[bool] = ..., expected_in_s: _Optional[float] = ..., pinned_s: _Optional[float] = ..., pin_bytes_max: _Optional[int] = ...) -> None: ...

class ConversationsReply(_message.Message):
    __slots__ = ("items", "known")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ConversationItem]
    known: int
    def __init__(self, items: _Optional[_Iterable[_Union[ConversationItem, _Mapping]]] = ..., known: _Optional[int] = ...) -> None: ...

class SlowRequest(_message.Message):
    __slots__ = ("kind", "over_s", "limit", "reset")
    KIND_FIELD_NUMBER: _ClassVar[int]
    OVER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    kind: str
    over_s: float
    limit: int
    reset: bool
    def __init__(self, kind: _Optional[str] = ..., over_s: _Optional[float] = ..., limit: _Optional[int] = ..., reset: _Optional[bool] = ...) -> None: ...

class SlowItem(_message.Message):
    __slots__ = ("kind", "took_s", "age_s", "waits", "request_id", "client", "session_id", "namespace_id", "blocks", "nbytes", "result")
    class WaitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    took_s: float
    age_s: float
    waits: _containers.ScalarMap[str, float]
    request_id: str
    client: str
    session_id: str
    namespace_id: bytes
    blocks: int
    nbytes: int
    result: str
    def __init__(self, kind: _Optional[str] = ..., took_s: _Optional[float] = ..., age_s: _Optional[float] = ..., waits: _Optional[_Mapping[str, float]] = ..., request_id: _Optional[str] = ..., client: _Optional[str] = ..., session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., blocks: _Optional[int] = ..., nbytes: _Optional[int] = ..., result: _Optional[str] = ...) -> None: ...

class SlowReply(_message.Message):
    __slots__ = ("items", "kept_s")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    KEPT_S_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SlowItem]
    kept_s: float
    def __init__(self, items: _Optional[_Iterable[_Union[SlowItem, _Mapping]]] = ..., kept_s: _Optional[float] = ...) -> None: ...

class MonitorRequest(_message.Message):
    __slots__ = ("namespace_id", "request_id", "tier", "misses_only", "kind")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MISSES_ONLY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    request_id: str
    tier: str
    misses_only: bool
    kind: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., tier: _Optional[str] = ..., misses_only: _Optional[bool] = ..., kind: _Optional[str] = ...) -> None: ...

class TierRange(_message.Message):
    __slots__ = ("begin", "end", "tier")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    tier: str
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class Answered(_message.Message):
    __slots__ = ("at", "kind", "outcome", "ranges", "block_tokens", "first_block", "stored_records", "existing_records", "refused_records", "nbytes")
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    STORED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    EXISTING_RECORDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_RECORDS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    at: float
    kind: str
    outcome: Outcome
    ranges: _containers.RepeatedCompositeFieldContainer[TierRange]
    block_tokens: int
    first_block: int
    stored_records: int
    existing_records: int
    refused_records: int
    nbytes: int
    def __init__(self, at: _Optional[float] = ..., kind: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., ranges: _Optional[_Iterable[_Union[TierRange, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., stored_records: _Optional[int] = ..., existing_records: _Optional[int] = ..., refused_records: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class MonitorReply(_message.Message):
    __slots__ = ("answered", "dropped")
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    answered: _containers.RepeatedCompositeFieldContainer[Answered]
    dropped: int
    def __init__(self, answered: _Optional[_Iterable[_Union[Answered, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("session_id", "namespace_id", "keys", "wait_s", "end_session", "expect", "prefetch", "pin", "demote")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    END_SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    namespace_id: bytes
    keys: bytes
    wait_s: float
    end_session: EndSession
    expect: Expect
    prefetch: Prefetch
    pin: Pin
    demote: Demote
    def __init__(self, session_id: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., wait_s: _Optional[float] = ..., end_session: _Optional[_Union[EndSession, _Mapping]] = ..., expect: _Optional[_Union[Expect, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., demote: _Optional[_Union[Demote, _Mapping]] = ...) -> None: ...

class EndSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Expect(_message.Message):
    __slots__ = ("in_s",)
    IN_S_FIELD_NUMBER: _ClassVar[int]
    in_s: float
    def __init__(self, in_s: _Optional[float] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pin(_message.Message):
    __slots__ = ("ttl_s", "bytes_max")
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    bytes_max: int
    def __init__(self, ttl_s: _Optional[float] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class Demote(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HintReply(_message.Message):
    __slots__ = ("blocks", "done_blocks", "done_bytes", "short", "took_s", "lasts_s")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    done_blocks: int
    done_bytes: int
    short: str
    took_s: float
    lasts_s: float
    def __init__(self, blocks: _Optional[int] = ..., done_blocks: _Optional[int] = ..., done_bytes: _Optional[int] = ..., short: _Optional[str] = ..., took_s: _Optional[float] = ..., lasts_s: _Optional[float] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value", "live")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    live: bool
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., live: _Optional[bool] = ...) -> None: ...

class GetConfigReply(_message.Message):
    __slots__ = ("settings", "path")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    path: str
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., path: _Optional[str] = ...) -> None: ...

class SetConfigRequest(_message.Message):
    __slots__ = ("assignments", "wait_s")
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    assignments: _containers.RepeatedScalarFieldContainer[str]
    wait_s: float
    def __init__(self, assignments: _Optional[_Iterable[str]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ChangedSetting(_message.Message):
    __slots__ = ("key", "before", "after")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class SetConfigReply(_message.Message):
    __slots__ = ("changed", "pending")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[ChangedSetting]
    pending: str
    def __init__(self, changed: _Optional[_Iterable[_Union[ChangedSetting, _Mapping]]] = ..., pending: _Optional[str] = ...) -> None: ...

class LogLinesRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class LogLinesReply(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIReply(_message.Message):
    __slots__ = ("tenant", "name", "role")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    role: str
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...
