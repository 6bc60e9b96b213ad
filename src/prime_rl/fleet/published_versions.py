"""The trainer's incarnations and versions, read from the run directory, and the orchestrator's lease on them."""

from pathlib import Path

from prime_rl.transport.incarnations import drop_lease, read_incarnations, read_lease, read_versions, write_lease
from prime_rl.transport.protocol import Incarnation, Lease, current_incarnation, newest_version, valid
from prime_rl.transport.weights import WeightsManifest, version_dir, weights_manifest


class PublishedVersions:
    """Incarnations and versions at the last refresh, and the orchestrator's lease."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.weights_dir = output_dir / "weights"
        self.incarnations: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.lease = read_lease(output_dir)

    @property
    def incarnation(self) -> Incarnation:
        """The trainer's current incarnation."""
        return current_incarnation(self.incarnations)

    @property
    def newest(self) -> int | None:
        """The newest version of the current lineage."""
        return newest_version(self.versions, self.incarnations)

    def refresh(self) -> None:
        """Read the run directory. Versions first: a version is never seen without the incarnation that made it."""
        self.versions = read_versions(self.weights_dir)
        self.incarnations = read_incarnations(self.output_dir)

    def valid(self, version: int) -> bool:
        """Whether `version` is committed and belongs to the current lineage."""
        return version in self.versions and valid(version, self.versions[version], self.incarnations)

    def manifest(self, version: int) -> WeightsManifest:
        """What a version consists of.

        Raises:
            CommitError: it is not committed (any more).
        """
        return weights_manifest(version_dir(self.weights_dir, version))

    def write_lease(self, lease: Lease) -> None:
        """Write down what may still be read, so that the trainer does not remove it."""
        if lease != self.lease:
            write_lease(self.output_dir, lease)
            self.lease = lease

    def release(self) -> None:
        """Nothing is read any more."""
        drop_lease(self.output_dir)
        self.lease = None
