"""Archives of a backup that lacks every third event: erased is never the same as never there.

In every second world the backup is a folder of files, of which these offsets are gaps.

Nothing is deleted from the topic here. Events are erased from the archives themselves, the oldest
events of the backup are removed at any offset, and generations are built of what is left there and
of the live generation's files. The account must tell both kinds of missing offsets apart, in every
generation.
"""

from __future__ import annotations

from tests.sim.archive_worlds import WHY, GenerationsWorld
from tidelog.archive.archive import find_archive
from tidelog.erasure.delete_archived import erase_archived, finish_archive
from tidelog.errors import ConflictError, InvalidError, NotFoundError
from tidelog.home import Home

__all__ = ["BackupsWorld"]


class BackupsWorld(GenerationsWorld):
    """One seed's world."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kinds = {"build", "erase", "trim"}
        self.is_followed = False
        self.source = "folder:t" if seed % 2 else "holed:t"

    def trim_to(self, number: int, past: bool) -> int:
        """Most often an offset inside of a range that all archives have committed.

        No archive of a backup keeps its events from being removed.
        """
        if past:
            return super().trim_to(number, past)
        return self.random.randint(0, self.read_by_all(number))

    def erase(self) -> None:
        """Erase events from archives, by id or by key."""
        home = self.home()
        for _ in range(4):
            home.context.clock.sleep(self.random.uniform(0, 8))
            with self.tolerating(NotFoundError, InvalidError, ConflictError):
                self.erase_some(home)
                self.done.erased += 1

    def erase_some(self, home: Home) -> None:
        ids = self.some_ids(3)
        self.accountant.asked.update(ids)
        for name in self.names():
            erase_archived(home.context, find_archive(home.context, name), WHY, ids)

    def check_erased(self, home: Home) -> None:
        """Finish erasures, and count again."""
        for name in self.names():
            finish_archive(home.context, find_archive(home.context, name))
        for live in self.folders.live():
            self.check_archive(home, live)
