"""The wire: typed messages, subjects and streams, the codec, and the Bus with its two implementations.

Importing this imports no torch and no service. Names a caller needs are here; the modules say what each guarantees.
"""

from driftline.messages.blobs import BlobRef, delete_blob, get_blob, has_blob, put_blob
from driftline.messages.bus import Bus, Delivery, Depth, PubAck, Stored
from driftline.messages.codec import decode, encode
from driftline.messages.dead_letters import DeadLetter, Raw, dead_letters
from driftline.messages.errors import (
    BrokerDenied,
    BrokerFull,
    BrokerUnavailable,
    ConfigError,
    DriftlineError,
    HeadConflict,
    IntegrityError,
    LeaseLost,
    MalformedMessage,
    PayloadTooLarge,
    UnknownSchema,
)
from driftline.messages.leases import Leases, lease
from driftline.messages.memory import MemoryBroker, MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.nats_connection import Credentials
from driftline.messages.recording import RecordedGroup, RecordedVersion, load_batch, load_version, store_batch, store_version
from driftline.messages.registry import register
from driftline.messages.server import NatsServer
from driftline.messages.subjects import (
    ConsumerSpec,
    Discard,
    Retention,
    StreamSpec,
    Subjects,
    Topology,
    stream_name,
    topology,
)
from driftline.messages.types import (
    Admitted,
    EvalResult,
    Finish,
    Graded,
    Group,
    LearnerOwner,
    Message,
    Metrics,
    Outcome,
    OutcomeEvent,
    Retried,
    RunFinished,
    Sampling,
    Task,
    Trajectory,
    array_field,
)

__all__ = [
    "Admitted",
    "BlobRef",
    "BrokerDenied",
    "BrokerFull",
    "BrokerUnavailable",
    "Bus",
    "ConfigError",
    "ConsumerSpec",
    "Credentials",
    "DeadLetter",
    "Delivery",
    "Depth",
    "Discard",
    "DriftlineError",
    "EvalResult",
    "Finish",
    "Graded",
    "Group",
    "HeadConflict",
    "IntegrityError",
    "LearnerOwner",
    "LeaseLost",
    "Leases",
    "MalformedMessage",
    "MemoryBroker",
    "MemoryBus",
    "Message",
    "Metrics",
    "NatsBus",
    "NatsServer",
    "Outcome",
    "OutcomeEvent",
    "PayloadTooLarge",
    "PubAck",
    "Raw",
    "RecordedGroup",
    "RecordedVersion",
    "Retention",
    "Retried",
    "RunFinished",
    "Sampling",
    "Stored",
    "StreamSpec",
    "Subjects",
    "Task",
    "Topology",
    "Trajectory",
    "UnknownSchema",
    "array_field",
    "dead_letters",
    "decode",
    "delete_blob",
    "encode",
    "get_blob",
    "has_blob",
    "lease",
    "load_batch",
    "load_version",
    "put_blob",
    "register",
    "store_batch",
    "store_version",
    "stream_name",
    "topology",
]
