"""Numbers as TensorBoard events, through tensorboard's own writer: torch is not needed to write a scalar."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def write(self, tag: str, value: float, step: int, at: float) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._writer.add_event(Event(wall_time=at, step=max(step, 0), summary=summary))

    def close(self) -> None:
        self._writer.close()
