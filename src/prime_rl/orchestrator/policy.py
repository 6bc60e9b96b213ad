"""The policy that is served: which versions belong to the trainer's present history, what the orchestrator may still read of them, and whether
the server can prove what it serves.
"""

from pathlib import Path

from prime_rl.errors import UserError
from prime_rl.orchestrator.engine import Engine, Served
from prime_rl.transport.lives import Seen, drop_lease, read_lease, read_lives, read_versions, write_lease
from prime_rl.transport.protocol import Lease, Life, current_life, newest_version, valid
from prime_rl.transport.weights import version_dir, weights_manifest


class ServedPolicy:
    """What the server must say it serves. During an update either of two versions is right."""

    def __init__(self, output_dir: Path, engine: Engine) -> None:
        self.output_dir = output_dir
        self.weights_dir = output_dir / "weights"
        self.engine = engine
        self.lives: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.lease = read_lease(output_dir)
        self._seen: Seen = {}
        self._expected: Served | None = None
        self._coming: Served | None = None

    @property
    def loading(self) -> int | None:
        """The version that the server is loading now, if it is."""
        return None if self._coming is None else self._coming.version

    @property
    def loaded(self) -> bool:
        """Whether the server was ever given a version."""
        return self._expected is not None

    @property
    def life(self) -> Life:
        """The trainer's present life, at the last look."""
        return current_life(self.lives)

    @property
    def newest(self) -> int | None:
        """The newest version of the present history, at the last look."""
        return newest_version(self.versions, self.lives)

    def look(self) -> None:
        """Read what stands in the run directory. Versions first: a version is never seen without the life that made it."""
        self.versions = read_versions(self.weights_dir, self._seen)
        self.lives = read_lives(self.output_dir)

    def valid(self, version: int) -> bool:
        """Whether `version` is committed and belongs to the present history, at the last look."""
        return version in self.versions and valid(version, self.versions[version], self.lives)

    def hold(self, lease: Lease) -> None:
        """Tell the trainer what may still be read, so that it does not remove it."""
        if lease != self.lease:
            write_lease(self.output_dir, lease)
            self.lease = lease

    def release(self) -> None:
        """Nothing is read any more."""
        drop_lease(self.output_dir)
        self.lease = None

    async def check_base(self, version: int) -> None:
        """Before anything is loaded: a server that holds another base model than the trainer is not ours to overwrite.

        Raises:
            UserError: the bases differ.
        """
        served = await self.engine.served()
        expected = weights_manifest(version_dir(self.weights_dir, version)).hash
        if version == served.version == 0 and served.hash != expected:
            raise UserError(
                f"the server at {self.engine.root} serves another base model ({served.hash[:12]}) than the trainer trains "
                f"({expected[:12]}): check model.name of both"
            )

    async def load(self, version: int) -> bool:
        """Have the server load a committed version and prove it.

        Returns:
            Whether it is still the server that was asked before: one that was started again in between served its base model meanwhile.

        Raises:
            UserError: it refused; the earlier version is still expected.
            CommitError: the version is not committed (any more).
        """
        manifest = weights_manifest(version_dir(self.weights_dir, version))
        before = self._expected
        self._coming = Served(manifest.version, manifest.hash, "" if before is None else before.boot)
        try:
            self._expected = await self.engine.update(manifest)
        finally:
            self._coming = None
        return before is None or before.boot == self._expected.boot

    async def proven(self) -> bool:
        """Whether the server answers, is the one that was asked before, and serves what it was given."""
        try:
            return await self.engine.served() in (self._expected, self._coming)
        except UserError:
            return False
