"""The policy that is served: which version the trainer's present life has committed, and whether the server can prove that it serves it."""

from pathlib import Path

from prime_rl.errors import UserError
from prime_rl.orchestrator.ckpt import Incarnation, latest_incarnation, newest_version
from prime_rl.orchestrator.engine import Engine, Served
from prime_rl.transport.commit import CommitError, list_steps
from prime_rl.transport.weights import version_dir, weights_manifest


class ServedPolicy:
    """What the server must say it serves. During an update either of two versions is right."""

    def __init__(self, output_dir: Path, engine: Engine) -> None:
        self.output_dir = output_dir
        self.weights_dir = output_dir / "weights"
        self.engine = engine
        self.life = Incarnation()
        self._expected: Served | None = None
        self._coming: Served | None = None

    @property
    def loading(self) -> int | None:
        """The version that the server is loading now, if it is."""
        return None if self._coming is None else self._coming.version

    def ready(self, version: int, resumed: bool) -> bool:
        """Whether the trainer has begun its life and committed `version`, and nothing of a life that was given up stands beyond it."""
        life = latest_incarnation(self.output_dir)
        if life.number < 0 or version not in list_steps(self.weights_dir):
            return False
        beyond = [later for later in list_steps(self.weights_dir) if later > version]
        if not (resumed and beyond):
            return True
        return life.start == version and all(self._made_by(later, life) for later in beyond)

    def newest(self) -> int | None:
        """The newest version of the trainer's present life, as far as it is known here."""
        return newest_version(self.weights_dir, self.life)

    def new_life(self) -> Incarnation | None:
        """The trainer's newer life, if it began one."""
        life = latest_incarnation(self.output_dir)
        return life if life.number > self.life.number else None

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

    async def load(self, version: int) -> None:
        """Have the server load a committed version and prove it.

        Raises:
            UserError: it refused; the earlier version is still expected.
            CommitError: the version is not committed (any more).
        """
        manifest = weights_manifest(version_dir(self.weights_dir, version))
        self._coming = Served(manifest.version, manifest.hash)
        try:
            self._expected = await self.engine.update(manifest)
        finally:
            self._coming = None

    async def proven(self) -> bool:
        """Whether the server answers, and serves what it was given. One that was restarted serves its base model again."""
        try:
            return await self.engine.served() in (self._expected, self._coming)
        except UserError:
            return False

    def _made_by(self, version: int, life: Incarnation) -> bool:
        try:
            return weights_manifest(version_dir(self.weights_dir, version)).incarnation == life.number
        except CommitError:  # being retired
            return False
