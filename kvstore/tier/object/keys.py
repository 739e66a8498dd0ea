"""The tenant's keys in the bucket: `keys/<number>`, wrapped by the root that all daemons share.

The highest number that the root opens counts. A new one is put only if it is absent, so daemons
that start at once agree on one. The keys of an epoch are there before anything that they seal, so
whoever meets an object of a newer epoch reads the keys again, and then has the one it needs.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from kvstore.format.frame import SegmentKey, clear_trailer
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError, CorruptBlock
from kvstore.sealing import Erasure, Keyring, Root, Sealing
from kvstore.sealing.keyring import stored_root
from kvstore.tier.object.failure import ObjectExists, ObjectFailed, ObjectGone, ObjectRefused
from kvstore.tier.object.names import Listed, Names, RunName, TombstoneName
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames

KEYS = "keys"
KEYS_NBYTES_MAX = 1 << 20
LOOKED_AT = 8  # objects, before the first keys are made
_NUMBER = re.compile(r"[0-9a-f]{16}", re.ASCII)


def names_of(sealing: Sealing | None, url: str) -> Names:
    """Return how a tier calls its objects. url: of its bucket; that of a tenant may have the
    tenant's prefix already."""
    if sealing is None:
        return Names()
    own = f"t/{sealing.tenant.hex()}"
    there = urlsplit(url).path.rstrip("/").endswith(f"/{own}")
    return SealedNames(sealing.tenant, "" if there else f"{own}/")


class BucketKeys:
    """Reads the keys, and makes them where there are none. names: of the objects they open."""

    def __init__(self, requests: Requests, names: Names, sealing: Sealing | None) -> None:
        self._requests = requests
        self.names = names
        self._sealing = sealing
        self._destroyed = False
        self._stale = False  # an object needs a newer key, and none could be read yet
        self._begun = self._ended = 0  # reads of the keys; the last one that ended well
        self._reading = asyncio.Lock()

    async def load(self, deadline: float) -> None:
        """Read the keys, unless they were, and nothing needs newer ones.

        Raises ObjectRefused if the root opens none of them; other errors of `Requests`.
        """
        names = self.names
        if not isinstance(names, SealedNames):
            return
        self._check_kept()
        if names.ring is None or self._stale:
            await self._read(names, deadline)

    async def key_of(
        self, name: RunName | TombstoneName, page: memoryview, deadline: float
    ) -> SegmentKey | None:
        """Return the key of an object with that last page; None in a bucket in clear.

        Reads the keys again if it needs a newer one. Raises CorruptBlock if none of the tenant's
        opens it, and as `load`: then it may be a good one.
        """
        names = self.names
        if not isinstance(names, SealedNames):
            return None
        clear = clear_trailer(page, name.tag)
        if clear is not None:
            key = names.keys.open(clear.key)
            if key is None and clear.key.epoch > names.keys.current:
                self._stale = True
                await self._read(names, deadline)
                key = names.keys.open(clear.key)
            if key is not None:
                return key
        raise CorruptBlock(f"object {name.nonce:016x}: no key of the tenant opens it")

    async def _read(self, names: SealedNames, deadline: float) -> None:
        """Read the keys as they are now. What began to be read after this was called will do."""
        before = self._begun
        try:
            async with asyncio.timeout(self._requests.left_s(deadline)):
                await self._reading.acquire()
        except TimeoutError as error:
            message = "another read of the bucket's keys has not ended"
            raise ObjectFailed(message, reason="timeout") from error
        try:
            if self._ended > before or self._sealing is None:
                return
            self._begun += 1
            found = await self._listed(deadline)
            if not found:
                await self._check_unused(names, deadline)
                self._check_kept()
                await self._create(self._sealing, deadline)
                found = await self._listed(deadline)
            ring = await self._newest(self._sealing, found, deadline)
            self._check_kept()
            names.ring, self._stale = ring, False
            self._ended = self._begun
        finally:
            self._reading.release()

    def _check_kept(self) -> None:
        if self._destroyed:
            raise ObjectRefused("the keys of the bucket were destroyed", reason="refused")

    async def rotate(self, deadline: float) -> int:
        """Begin a new epoch; return it. Raises ConfigError, and as `load`."""
        return await self._replace(lambda ring, sealing: ring.rotated(sealing.root), deadline)

    async def rewrap(self, root: Root, deadline: float) -> int:
        """Wrap the keys by another root; return the newest epoch. Raises as `rotate`."""
        return await self._replace(lambda ring, _: ring.rewrapped(root), deadline)

    async def are_there(self, deadline: float) -> bool:
        """Say whether the tenant has keys in the bucket."""
        return bool(await self._listed(deadline))

    async def destroy(self, deadline: float) -> Erasure:
        """Destroy the keys: overwrite and remove them. Nothing that they opened can be read again,
        as far as the answer says and the bucket keeps no older versions."""
        erasure = Erasure.NONE
        if self._sealing is None:
            return erasure
        self._destroyed = True  # nothing makes new ones
        for listed in await self._listed(deadline):
            data = await self._fetch(listed, deadline)
            stored = stored_root(data)
            if stored is not None:
                forget = self._sealing.root.forget
                erasure = await asyncio.to_thread(forget, self._sealing.tenant, stored)
            zeros = bytes(listed.nbytes)
            await self._requests.put(listed.name, [zeros], len(zeros), deadline)
            await self._requests.delete([listed.name], deadline)
        if isinstance(self.names, SealedNames):
            self.names.ring = None
        return erasure

    async def _replace(self, change: Callable[[Keyring, Sealing], Keyring], deadline: float) -> int:
        names, sealing = self.names, self._sealing
        if not isinstance(names, SealedNames) or sealing is None:
            raise ConfigError("the bucket is not encrypted: set security.root_key_file")
        await self.load(deadline)
        # Of what is there now, and only of that: others may have changed it since it was read.
        found = await self._listed(deadline)
        ring = await self._newest(sealing, found[:1], deadline)
        ring = await asyncio.to_thread(change, ring, sealing)
        newest = max(map(self._number, found))
        data = ring.encode()
        try:
            await self._requests.put(
                self._name(newest + 1), [data], len(data), deadline, absent=True
            )
        except ObjectExists as error:
            raise ConfigError("another daemon or command changes the keys: try again") from error
        names.ring = ring
        # An old root must not open what an older number holds.
        await self._requests.delete([each.name for each in found], deadline)
        return ring.current

    async def _check_unused(self, names: SealedNames, deadline: float) -> None:
        """Raise ObjectRefused if there are encrypted objects: other keys would never open them."""
        page = await self._requests.first_page(names.prefix.rstrip("/"), deadline, probe=True)
        for listed in page[:LOOKED_AT]:
            run, start = names.parse_run(listed.name), listed.nbytes - PAGE_NBYTES
            if run is None or start < 0:
                continue
            try:
                last = await self._requests.fetch(listed.name, start, PAGE_NBYTES, deadline)
            except ObjectGone:
                continue
            if clear_trailer(last, run.tag) is not None:
                raise ObjectRefused(
                    f"the bucket has lost its keys: put {names.prefix}{KEYS}/ back from a backup, "
                    "or delete the objects beside it",
                    reason="refused",
                )

    async def _create(self, sealing: Sealing, deadline: float) -> None:
        ring = await asyncio.to_thread(Keyring.create, sealing.root, sealing.tenant)
        data = ring.encode()
        try:
            await self._requests.put(self._name(1), [data], len(data), deadline, absent=True)
        except ObjectExists:
            pass  # those of another daemon count

    async def _newest(self, sealing: Sealing, found: list[Listed], deadline: float) -> Keyring:
        problem = "its keys are gone"
        for listed in found:
            data = await self._fetch(listed, deadline)
            try:
                return await asyncio.to_thread(
                    Keyring.load, sealing.root, sealing.tenant, data, listed.name
                )
            except ConfigError as error:
                problem = str(error)
        raise ObjectRefused(f"the bucket is encrypted: {problem}", reason="refused")

    async def _listed(self, deadline: float) -> list[Listed]:
        """Return what there is, the highest number first."""
        page = await self._requests.first_page(f"{self.names.prefix}{KEYS}", deadline, probe=True)
        found = [each for each in page if self._number(each) and each.nbytes <= KEYS_NBYTES_MAX]
        return sorted(found, key=self._number, reverse=True)

    async def _fetch(self, listed: Listed, deadline: float) -> bytes:
        try:
            return bytes(await self._requests.fetch(listed.name, 0, listed.nbytes, deadline))
        except ObjectGone:
            return b""

    def _name(self, number: int) -> str:
        return f"{self.names.prefix}{KEYS}/{number:016x}"

    def _number(self, listed: Listed) -> int:
        """Return the number in a name; 0 for another name."""
        text = listed.name.removeprefix(f"{self.names.prefix}{KEYS}/")
        return int(text, 16) if _NUMBER.fullmatch(text) else 0
