"""Damage to what a stopped server keeps: caches that are gone, bytes that are wrong.

Knows the server's layout no further than this: databases are RocksDB directories, `catalog` is the one that must not
be lost, and `s3` holds the objects of the object store that the server brings along.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from harness.objectstore import flipped

_BLOB_HEADER = 30
_BLOB_FOOTER = 32
_RECORD_HEADER = 32


def caches(data_dir: Path) -> list[Path]:
    """The databases that hold nothing but what can be had again."""
    found = [path.parent for path in data_dir.rglob("CURRENT") if "catalog" not in path.relative_to(data_dir).parts]
    assert found, f"no chunk cache below {data_dir}"
    return found


def wipe_caches(data_dir: Path) -> None:
    """Removes the chunk caches altogether."""
    for path in caches(data_dir):
        shutil.rmtree(path)


def flip_cached_chunks(data_dir: Path) -> int:
    """Flips one byte in each value of the chunk caches' blob files; how many.

    The layout is RocksDB's (`db/blob/blob_log_format.h`): a header, then records of a header with the lengths of key
    and value, key, value; then a footer if the file is complete.
    """
    count = 0
    for path in (path for cache in caches(data_dir) for path in cache.glob("*.blob")):
        data = bytearray(path.read_bytes())
        place = _BLOB_HEADER
        while place + _RECORD_HEADER < len(data) - _BLOB_FOOTER:
            key, value = struct.unpack_from("<QQ", data, place)
            if value == 0 or place + _RECORD_HEADER + key + value > len(data):
                break
            data[place + _RECORD_HEADER + key + value // 2] ^= 0x40
            count += 1
            place += _RECORD_HEADER + key + value
        path.write_bytes(data)
    return count


def flip_stored_packs(data_dir: Path) -> int:
    """Flips bytes all over the large objects of the server's own object store; how many objects. Twice: as before."""
    packs = [path for path in (data_dir / "s3").rglob("*") if path.is_file() and path.stat().st_size > 64 << 10]
    for path in packs:
        path.write_bytes(flipped(path.read_bytes()))
    return len(packs)
