"""The host waits for a device that is slower than it, so the memory of fetched weights is bounded."""

from torch import nn, ones

from wandistiller.engine.workarounds import FetchPace


class Device:
    """A device that works only when the host waits for it; counts the blocks that it has not finished."""

    def __init__(self) -> None:
        self.given = self.done = self.most = 0

    def event(self) -> "Device.Event":
        return Device.Event(self)

    class Event:
        def __init__(self, device: "Device"):
            self.device = device

        def record(self) -> None:
            self.device.given += 1
            self.place = self.device.given

        def synchronize(self) -> None:
            self.device.done = max(self.device.done, self.place)


def test_weights_are_fetched_while_one_block_is_computed_and_no_further_ahead() -> None:
    blocks, device, waiting = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))), Device(), []
    for block in blocks:  # as DeepSpeed's, registered before
        block.register_forward_pre_hook(lambda *_: waiting.append(device.given - device.done))
    FetchPace(blocks, device.event)
    for _ in range(2):
        blocks(ones(1, 2))
    assert waiting == [0, 1, *[1] * 16]
