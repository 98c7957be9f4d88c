"""What all files of one download share, and the two questions that it answers: where to ask, and what is right."""

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
    """One download: what comes, where it goes, how long to wait, what is counted, when to stop."""

    listing: Listing
    destination: Destination
    policy: RetryPolicy
    meter: Meter
    stop: threading.Event

    def is_intact(self, path: Path, file: RemoteFile) -> bool:
        """Whether the content at `path` is the file's, counted while it is read."""
        return is_intact(path, file, lambda position: self.meter.at(file.name, position), self.stop)

    def url(self, file: RemoteFile) -> str:
        """Where the hub serves the file at the commit of the listing."""
        return hf_hub_url(self.listing.repository, file.name, revision=self.listing.commit)

    @property
    def timeout(self) -> float:
        """Seconds that one read may take: HF_HUB_DOWNLOAD_TIMEOUT."""
        return min(float(constants.HF_HUB_DOWNLOAD_TIMEOUT), self.policy.stall)
