"""The state that all files of one download share."""

import threading
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, hf_hub_url

from dsv4cli.engine.hub.destination import Destination
from dsv4cli.engine.hub.files import Listing, RemoteFile, is_intact
from dsv4cli.engine.hub.retry import RetryPolicy
from dsv4cli.engine.system.threads import Meter


@dataclass(frozen=True)
class DownloadContext:
    """One download: its listing, destination, retry policy, progress meter and stop event."""

    listing: Listing
    destination: Destination
    policy: RetryPolicy
    meter: Meter
    stop: threading.Event

    def is_intact(self, path: Path, file: RemoteFile) -> bool:
        """Return whether the file at `path` matches the listing; the bytes read count as progress."""
        return is_intact(path, file, lambda position: self.meter.at(file.name, position), self.stop)

    def url(self, file: RemoteFile) -> str:
        """Return the hub's URL of a file at the commit of the listing."""
        return hf_hub_url(self.listing.repository, file.name, revision=self.listing.commit)

    @property
    def timeout(self) -> float:
        """Timeout of one read in seconds: HF_HUB_DOWNLOAD_TIMEOUT."""
        return min(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), self.policy.stall)
