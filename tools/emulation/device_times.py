"""What emulated devices sleep: the times of a profile, as the cost model reads them."""

from __future__ import annotations

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.workload import Workload


class DeviceTimes:
    """Seconds of layers and updates by device type."""

    def __init__(self, profile: Profile, workload: Workload) -> None:
        """Raises `ProfileError` if the profile is for another workload."""
        self._clock = LayerTimeModel(profile, workload)

    def layer_s(self, device_type: str, kind: str, num_rows: int, backward: bool) -> float:
        """One pass of one layer; a layer that is recomputed runs its forward again by itself."""
        find = self._clock.backward_s if backward else self._clock.forward_s
        return find(kind, device_type, num_rows, "none")

    def update_s(self, device_type: str, num_parameters: int) -> float:
        return self._clock.update_s(device_type, num_parameters)
