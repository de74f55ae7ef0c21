"""Of a catalogue entry: how many copies of the model there are, what each runs at once, and on which devices."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from pool.sections import Section

RequestPolicy = Literal["least_inflight", "consistent_hash"]
LEAST_INFLIGHT: Final = "least_inflight"
CONSISTENT_HASH: Final = "consistent_hash"
#: Parts the devices of several replicas on one machine.
DEVICE_SEPARATOR = ";"
#: The devices of one replica: indices, or the ids of devices and of their slices.
_DEVICES = re.compile(r"[A-Za-z0-9][A-Za-z0-9/:._-]*(,[A-Za-z0-9][A-Za-z0-9/:._-]*)*")


def names_devices(text: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES may be this, for one replica."""
    return _DEVICES.fullmatch(text) is not None


class ReplicaSettings(Section):
    """The part of `[models.NAME]` about its replicas."""

    target_inflight: int = Field(
        default=1, ge=1, le=1024, description="Generations a replica runs at once, if its engine can."
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Workers of this model that `genpool up` starts. 0: none; others serve it.",
    )
    replica_max: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Replicas there may be at once, wherever they were started; a further worker waits, without the "
        "model, until one leaves. 0: as many as come.",
    )
    request_policy: RequestPolicy = Field(
        default=LEAST_INFLIGHT,
        description="Which replica serves a request that belongs to no Program. `least_inflight`: the emptiest. "
        "`consistent_hash`: one with a session header goes to the replica that earlier ones of its session went to, "
        "unless that is much fuller than others.",
    )
    device: str = Field(
        default="",
        max_length=1000,
        description="Devices a replica sees, as `CUDA_VISIBLE_DEVICES` names them: `0`, or `0,1`. `0;1`: of several "
        "replicas on a machine the first gets `0`, the second `1`, and so on, in turn. Empty: as the environment says.",
    )

    @field_validator("device")
    @classmethod
    def _names_devices(cls, value: str) -> str:
        if value and not all(map(names_devices, value.split(DEVICE_SEPARATOR))):
            raise ValueError("must be what CUDA_VISIBLE_DEVICES takes, like 0 or 0,1; of several replicas, parted by ;")
        return value

    @model_validator(mode="after")
    def _replicas_fit(self) -> ReplicaSettings:
        if 0 < self.replica_max < self.replicas:
            raise ValueError(f"replica_max ({self.replica_max}) must be 0 or at least replicas ({self.replicas})")
        return self

    def device_of(self, replica: int) -> str:
        """What the replica of this number (from 0) on its machine may see; "" when nothing is said of that."""
        devices = self.device.split(DEVICE_SEPARATOR)
        return devices[replica % len(devices)]
