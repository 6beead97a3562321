"""Ways to damage the files of a checkpoint, a policy, a dense folder or a trace, each drawn from a seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What stands in for a value, whatever it was.
ODD_VALUES = (
    *(
        None,
        True,
        [],
        {},
        "",
        "0",
        "../../etc/passwd",
        "/dev/zero",
        "pages-00001.safetensors",
        "lut16",
        "\u0663",
        "x" * 5000,
    ),
    *(0, 1, -1, 2, 7, 255, 2**31, 2**40, 2**62, 2**63 - 1, 10**18, 0.5, -0.0, 1e300, [[0, 1]], [2, 3], {"a": 1}),
)
# Text that is no JSON in the strict sense, or that some parsers choke on.
ODD_TEXT = (
    "NaN",
    "-Infinity",
    "1e999",
    "1" * 5000,
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"version": 1, "version": 2}',
    "\ufeff{}",
    "",
)


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one file of the folder, or several, in one way; says what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return "nothing left"
    path = rng.choice(files)
    texts, tables = (".json", ".jsonl"), (".safetensors",)
    ways: list[Callable[[Path, random.Random], str]] = [flip, cut, grow, shuffle_pieces, remove, empty, relink]
    if path.suffix in texts:
        ways += [change_json] * 8 + [replace_text]
    if path.suffix in tables:
        ways += [change_header] * 8
    way = rng.choice([*ways, swap])
    try:
        did = swap(files, rng) if way is swap else way(path, rng)
    except (ValueError, OSError, RecursionError):  # earlier damage has left nothing that could be damaged so
        did = "impossible"
    return f"{path.relative_to(folder)}: {way.__name__} {did}"[:300]


def flip(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = [rng.randrange(len(content)) for _ in range(rng.randint(1, 8))]
    for place in at:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"at {at}"


def cut(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    kept = rng.choice([0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))])
    path.write_bytes(content[:kept])
    return f"to {kept}"


def grow(path: Path, rng: random.Random) -> str:
    more = rng.choice([b"\0", b"}", b" ", rng.randbytes(100), path.read_bytes()])
    path.write_bytes(path.read_bytes() + more)
    return f"by {len(more)}"


def shuffle_pieces(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    a, b, c = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    path.write_bytes(content[:a] + content[b:c] + content[a:b] + content[c:])
    return f"at {a}, {b}, {c}"


def remove(path: Path, rng: random.Random) -> str:
    path.unlink()
    return ""


def empty(path: Path, rng: random.Random) -> str:
    """A folder, or nothing, in its place."""
    path.unlink()
    path.mkdir() if rng.random() < 0.5 else path.write_bytes(b"")
    return "folder" if path.is_dir() else "file"


def relink(path: Path, rng: random.Random) -> str:
    target = rng.choice(["/dev/zero", "/dev/null", "/etc/hostname", ".", str(path), "nowhere"])
    path.unlink()
    path.symlink_to(target)
    return f"to {target}"


def swap(files: list[Path], rng: random.Random) -> str:
    one, other = rng.choices(files, k=2)
    held = one.read_bytes()
    shutil.copyfile(other, one) if one != other else None
    other.write_bytes(held)
    return f"{one.name} and {other.name}"


def replace_text(path: Path, rng: random.Random) -> str:
    text = rng.choice(ODD_TEXT)
    path.write_text(text, encoding="utf-8")
    return text[:40]


def change_json(path: Path, rng: random.Random) -> str:
    """One value of a document, or of a line of a .jsonl file; sometimes text that only looks like JSON."""
    lines = (
        path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]
    )
    at = rng.randrange(len(lines))
    lines[at], did = _changed(lines[at], rng)
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"line {at}: {did}"


def change_header(path: Path, rng: random.Random) -> str:
    """One value of a safetensors header, its length field made to fit; or the length field alone."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.1:
        said = rng.choice([0, 1, length - 1, length + 8, len(content), 2**31, 2**63 - 1, 2**64 - 1])
        path.write_bytes((max(0, said) % 2**64).to_bytes(8, "little") + content[8:])
        return f"length {said}"
    text, did = _changed(content[8 : 8 + length].decode(), rng)
    head = text.encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
    return did


def _changed(text: str, rng: random.Random) -> tuple[str, str]:
    document = json.loads(text)
    places = list(_places(document))
    if not places:
        return rng.choice(ODD_TEXT), "odd text"
    holder, key = rng.choice(places)
    old = holder[key]
    kind = rng.choice(["odd", "odd", "near", "near", "delete", "twin", "swap", "text", "reorder"])
    if kind == "delete":
        del holder[key]
    elif kind == "near" and isinstance(old, int):
        holder[key] = old + rng.choice([-1, 1, 8, old, -2 * old])
    elif kind == "near" and isinstance(old, str) and old:
        place = rng.randrange(len(old))
        holder[key] = old[:place] + rng.choice(["", "A", "\0", "/", "9"]) + old[place + 1 :]
    elif kind == "twin" and isinstance(holder, list):
        holder.append(old)
    elif kind == "swap":
        other, name = rng.choice(places)
        holder[key], other[name] = other[name], holder[key]
    elif kind == "text":
        mark = "@@here@@"
        holder[key] = mark
        return json.dumps(document).replace(f'"{mark}"', rng.choice(ODD_TEXT)), f"text for {key}"
    elif kind == "reorder" and isinstance(holder, list):
        rng.shuffle(holder)
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return _dumped(document), f"{kind} {key}"


def _dumped(document: Any) -> str:
    """Without recursion into itself: a swap may have put a list into one of its own values."""
    try:
        return json.dumps(document)
    except ValueError:
        return "{}"


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value."""
    found, waiting = [], [document] if isinstance(document, dict | list) else []
    while waiting:
        holder = waiting.pop()
        keys = holder.keys() if isinstance(holder, dict) else range(len(holder))
        for key in list(keys):
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found
