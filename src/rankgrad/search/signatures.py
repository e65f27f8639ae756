"""Which files this user wrote on this machine.

A folder of embeddings names the folder of its images, and an index the folder of its embeddings. Followed blindly, a folder
from elsewhere could make a server show any image on the disk. So what is written here is signed with a key that stays on this
machine, `~/.local/state/rankgrad/key`, and what is not signed with it is not followed out of its own folder.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY_BYTES = 32


def sign(content: Mapping[str, Any]) -> str:
    """A signature of `content`, which JSON can hold; "" where no key can be kept."""
    key = _key(create=True)
    return "" if key is None else _signature(key, content)


def is_own(content: Mapping[str, Any], signature: object) -> bool:
    """Whether `signature` is this user's, of this very content."""
    key = _key(create=False)
    if key is None or not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(_signature(key, content), signature)


def _signature(key: bytes, content: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes | None:
    state = os.environ.get("XDG_STATE_HOME")
    try:
        path = (Path(state) if state else Path.home() / ".local" / "state") / "rankgrad" / "key"
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was first
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return None
    return key if len(key) == KEY_BYTES else None
