"""What wraps the keys of what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.model.errors import ConfigError
from kvstore.settings.declare import setting
from kvstore.settings.values import is_path


@dataclass(frozen=True, slots=True, kw_only=True)
class RootKeySettings:
    """Encryption of what is stored."""

    root_key_file: str = setting(
        "File of the root key: 32 random bytes, or those as hex or base64, mode 0400, on another "
        "disk than file.path. `kvstore key create` makes one. With it, files and objects are "
        'encrypted. "" is no encryption. Needs the extra kvstore-tiers[security].',
        "",
    )
    root_command: str | tuple[str, ...] = setting(
        'Command that asks a key service instead of reading a file, e.g. ["/usr/local/bin/'
        'kvstore-kms"], without a shell. It has 10 s, and three operations: see the page on '
        "encryption.",
        "",
    )
    accept_plain: bool = setting(
        "With a root key, serve also what was stored in clear before. Whoever can write to the "
        "disk can then forge blocks. `kvstore gc --seal` encrypts such directories instead.",
        False,
    )

    @property
    def root_argv(self) -> tuple[str, ...]:
        """The command, none if there is none."""
        command = self.root_command
        return tuple(filter(None, (command,) if isinstance(command, str) else command))

    @property
    def encrypts(self) -> bool:
        """Whether what is stored is encrypted."""
        return bool(self.root_key_file or self.root_argv)


def check_root_key(settings: RootKeySettings) -> None:
    """Raise ConfigError on what cannot be."""
    if not is_path(settings.root_key_file) or not all(map(is_path, settings.root_argv)):
        raise ConfigError("security.root_key_file and root_command have no zero bytes")
    if settings.root_key_file and settings.root_argv:
        raise ConfigError("security.root_key_file and security.root_command: set one of them")
    if settings.accept_plain and not settings.encrypts:
        raise ConfigError("security.accept_plain goes with a root key: set security.root_key_file")
