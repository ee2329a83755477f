"""Apply patches/ to an installed SGLang: by content, whole or not at all, and reversible.

Two things are installed below the package: sglang/srt/hidden_state_dump.py (byte-equal to patches/hidden_state_dump.py) and the few changed lines of
patches/sglang-<version>/hidden_state_dump.patch. A copy of the patch that was applied lies beside them, so a later version can take exactly that back.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .errors import UserError
from .paths import ROOT

PATCHES = ROOT / "patches"
CODE = "sglang/srt/hidden_state_dump.py"
RECORD = "sglang/srt/hidden_state_dump.patch"  # the patch as it was applied
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Mismatch(Exception):
    """A file does not hold the lines that a patch expects."""


@dataclass
class Hunk:
    """Lines (with their ends) before and after, and the 1-based line where they start in the old and in the new file."""

    old_start: int
    new_start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def parse_patch(text: str) -> dict[str, list[Hunk]]:
    """A unified diff with a/ and b/ prefixes -> hunks by path."""
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    for line in text.splitlines(keepends=True):
        if line.startswith("--- "):
            hunks = None
        elif line.startswith("+++ b/"):
            hunks = files.setdefault(line[6:].split("\t")[0].strip(), [])
        elif match := HUNK.match(line):
            hunks.append(Hunk(int(match.group(1)), int(match.group(3))))
        elif hunks:
            if line[0] in " -":
                hunks[-1].old.append(line[1:])
            if line[0] in " +":
                hunks[-1].new.append(line[1:])
    return files


def patched(text: str, hunks: list[Hunk], reverse: bool = False) -> str:
    """`text` with the hunks applied at exactly the lines they name. Raises Mismatch."""
    lines = text.splitlines(keepends=True)
    result: list[str] = []
    position = 0
    for hunk in hunks:
        before, after, start = (hunk.new, hunk.old, hunk.new_start) if reverse else (hunk.old, hunk.new, hunk.old_start)
        start -= 1
        if lines[start : start + len(before)] != before or start < position:
            raise Mismatch(f"line {start + 1}")
        result += lines[position:start] + after
        position = start + len(before)
    return "".join(result + lines[position:])


class Installation:
    """One SGLang, found by `site` (the folder that holds sglang/) and its version."""

    def __init__(self, site: Path, version: str, patches: Path = PATCHES):
        self.site, self.version, self.patches = site, version, patches
        self.supported = sorted(path.parent.name.removeprefix("sglang-") for path in patches.glob("sglang-*/hidden_state_dump.patch"))
        if version not in self.supported:
            raise UserError(
                f"SGLang {version} is installed in {site}, and there are patches for {', '.join(self.supported)}; install one of these "
                "(pip install sglang==VERSION), or add this one as 'Adding a version' in patches/README.md says"
            )
        self.patch_text = (patches / f"sglang-{version}" / "hidden_state_dump.patch").read_text()
        self.code = (patches / "hidden_state_dump.py").read_bytes()

    @classmethod
    def active(cls) -> Installation:
        """The SGLang of the Python that runs this. Raises UserError when there is none, or one without a patch."""
        try:
            found = metadata.distribution("sglang")
        except metadata.PackageNotFoundError:
            raise UserError(f"{sys.executable} has no SGLang; run `make setup`, or name a Python that has it with PY=/path/to/python") from None
        return cls(Path(str(found.locate_file(""))), found.version)

    def _read(self, path: str) -> str:
        try:
            return (self.site / path).read_text()
        except FileNotFoundError:
            raise UserError(f"{self.site / path} does not exist: this SGLang {self.version} is not whole; install it again") from None

    def _apply(self, texts: dict[str, str], patch: str, reverse: bool) -> dict[str, str]:
        files = parse_patch(patch)
        return texts | {path: patched(texts[path] if path in texts else self._read(path), hunks, reverse) for path, hunks in files.items()}

    def unpatched(self) -> dict[str, str]:
        """The files that the patch touches, as SGLang ships them. Raises UserError when they are neither that nor what one of our patches makes of it."""
        record = self.site / RECORD
        attempts = ([record.read_text()] if record.exists() else []) + [self.patch_text]
        for patch in attempts:
            try:
                return self._apply({}, patch, reverse=True)
            except Mismatch:
                continue
        plain = {path: self._read(path) for path in parse_patch(self.patch_text)}
        try:
            self._apply(plain, self.patch_text, reverse=False)
        except Mismatch as exc:
            raise UserError(
                f"{', '.join(str(self.site / path) for path in plain)} is neither SGLang {self.version} as released nor with a patch of Aerie ({exc} differs); "
                f"nothing was changed: install it again (pip install --force-reinstall --no-deps sglang=={self.version}) and run this once more"
            ) from None
        return plain

    def wanted(self) -> dict[str, bytes]:
        """Every file as it must be, by path below the site folder."""
        texts = self._apply(self.unpatched(), self.patch_text, reverse=False)
        return {CODE: self.code, **{path: text.encode() for path, text in texts.items()}, RECORD: self.patch_text.encode()}

    def differing(self) -> list[str]:
        """The paths that are not as they must be: empty when exactly this checkout's version is installed."""
        return [path for path, content in self.wanted().items() if not (self.site / path).is_file() or (self.site / path).read_bytes() != content]

    def apply(self) -> bool:
        """Install; True when something changed. After a change the files are imported, and taken back if that fails."""
        with self._lock():
            todo = self.differing()
            if not todo:
                return False
            plain = self.unpatched()
            self._install({path: content for path, content in self.wanted().items() if path in todo})
            failure = self.import_failure()
            if failure:
                self._remove(plain)
                raise UserError(f"SGLang {self.version} does not import with the patch, so it was taken back: {failure}")
            return True

    def reverse(self) -> bool:
        """Take everything back; True when something changed."""
        with self._lock():
            plain = self.unpatched()
            if not (self.site / CODE).exists() and not (self.site / RECORD).exists() and all(self._read(path) == text for path, text in plain.items()):
                return False
            self._remove(plain)
            return True

    def import_failure(self) -> str:
        """The last line of the error when the changed modules are imported in a fresh Python; empty when they import."""
        modules = [path.removesuffix(".py").replace("/", ".") for path in (CODE, *parse_patch(self.patch_text))]
        code = f"import sys; sys.path.insert(0, {str(self.site)!r}); import " + ", ".join(modules)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=os.environ | {"SGLANG_HS_DUMP_DIR": ""}, check=False)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]

    def _remove(self, plain: dict[str, str]) -> None:
        self._install({path: text.encode() for path, text in plain.items()})
        for path in (RECORD, CODE):
            (self.site / path).unlink(missing_ok=True)

    def _install(self, contents: dict[str, bytes]) -> None:
        """Write all under temporary names first, then rename one after the other: what can fail (disk, rights) fails before anything is touched."""
        written: list[tuple[Path, Path]] = []
        try:
            for path, content in contents.items():
                target = self.site / path
                temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
                written.append((temporary, target))
                temporary.write_bytes(content)
                if target.exists():
                    os.chmod(temporary, target.stat().st_mode & 0o777)
            for temporary, target in written:
                os.replace(temporary, target)
        except PermissionError as exc:
            raise UserError(f"{exc.filename} cannot be written; run this as the user who owns the environment, or use another one (make setup VENV=/path)") from None
        finally:
            for temporary, _ in written:
                temporary.unlink(missing_ok=True)

    def _lock(self) -> _Lock:
        return _Lock(self.site / "sglang")


class _Lock:
    """Checkouts that share an environment take turns: a lock on the package's folder itself, so no file is left behind."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        self.handle = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        os.close(self.handle)
