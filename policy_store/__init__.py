"""Policy versions: weights as a chain of manifests over content-addressed blobs, exact, verified, and cheap to follow."""

from driftline.policy_store.blobs import (
    BlobRef,
    BlobStore,
    DirectoryBlobs,
    JetStreamBlobs,
    MemoryBlobs,
    StoredBlob,
)
from driftline.policy_store.location import StoreLocated, located_store, open_store
from driftline.policy_store.manifest import Link, Manifest, PolicyHead, VersionKind
from driftline.policy_store.model_files import ModelFiles
from driftline.policy_store.pins import Pins
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import HostTensor, State, state_digest
from driftline.policy_store.writer import PolicyWriter

__all__ = [
    "BlobRef",
    "BlobStore",
    "DirectoryBlobs",
    "HostTensor",
    "JetStreamBlobs",
    "Link",
    "Manifest",
    "MemoryBlobs",
    "ModelFiles",
    "Pins",
    "PolicyHead",
    "PolicyReader",
    "PolicyWriter",
    "State",
    "StoreLocated",
    "StoredBlob",
    "VersionKind",
    "located_store",
    "open_store",
    "state_digest",
]
