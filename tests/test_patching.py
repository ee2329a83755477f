"""00_apply_patch.sh on a copy of the files it changes: by content, whole or not at all, and back again byte for byte."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from aerie import patching
from aerie.errors import UserError
from aerie.patching import CODE, RECORD, Installation, parse_patch
from aerie.paths import ROOT
from aerie.prove import refuse_without_oracle

RUNNER = "sglang/srt/model_executor/model_runner.py"
ORIGINAL = "import logging\nimport time\n\n\nclass ModelRunner:\n    def load_model(self):\n        self.model = load()\n\n    def forward(self):\n        return 1\n"
PATCHED = ORIGINAL.replace("import time\n", "import os\nimport time\n").replace("load()\n", "load()\n        hidden_state_dump.install(self)\n")


def diff(old: str, new: str) -> str:
    """A patch as patches/ holds them."""
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{RUNNER}", f"b/{RUNNER}", n=2))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with just enough of SGLang; no package of that name can be imported from it by accident."""
    folder = tmp_path / "site"
    (folder / RUNNER).parent.mkdir(parents=True)
    (folder / RUNNER).write_text(ORIGINAL)
    for package in ("sglang", "sglang/srt", "sglang/srt/model_executor"):
        (folder / package / "__init__.py").write_text("")
    return folder


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A patches/ folder for one version."""
    folder = tmp_path / "patches"
    (folder / "sglang-9.9.9").mkdir(parents=True)
    (folder / "sglang-9.9.9" / "hidden_state_dump.patch").write_text(diff(ORIGINAL, PATCHED))
    (folder / "hidden_state_dump.py").write_text("VERSION = 1\n")
    return folder


def state(site: Path) -> dict[str, str]:
    """Every file and what it holds."""
    return {str(path.relative_to(site)): path.read_text() for path in sorted(site.rglob("*")) if path.is_file() and "__pycache__" not in path.parts}


def test_apply_check_reverse(site: Path, patches: Path) -> None:
    before = state(site)
    one = Installation(site, "9.9.9", patches)
    assert one.differing() == [CODE, RUNNER, RECORD]
    assert one.apply() is True
    assert (site / RUNNER).read_text() == PATCHED and (site / CODE).read_bytes() == (patches / "hidden_state_dump.py").read_bytes()
    assert one.differing() == []
    after = state(site)
    times = {path: (site / path).stat().st_mtime_ns for path in after}
    assert one.apply() is False
    assert state(site) == after and all((site / path).stat().st_mtime_ns == times[path] for path in after)
    assert one.reverse() is True and state(site) == before
    assert one.reverse() is False and state(site) == before


def test_a_changed_code_file_or_patch_replaces_the_older_one(site: Path, patches: Path) -> None:
    Installation(site, "9.9.9", patches).apply()
    (patches / "hidden_state_dump.py").write_text("VERSION = 2\n")
    one = Installation(site, "9.9.9", patches)
    assert one.differing() == [CODE]
    assert one.apply() and (site / CODE).read_text() == "VERSION = 2\n"
    newer = PATCHED.replace("hidden_state_dump.install(self)", "hidden_state_dump.install(self, 2)")
    (patches / "sglang-9.9.9" / "hidden_state_dump.patch").write_text(diff(ORIGINAL, newer))
    one = Installation(site, "9.9.9", patches)
    assert one.differing() == [RUNNER, RECORD]
    assert one.apply() and (site / RUNNER).read_text() == newer
    assert one.reverse() and (site / RUNNER).read_text() == ORIGINAL


def test_a_tree_that_matches_neither_is_refused_and_untouched(site: Path, patches: Path) -> None:
    (site / RUNNER).write_text(ORIGINAL.replace("self.model = load()", "self.model = load_my_way()"))
    before = state(site)
    one = Installation(site, "9.9.9", patches)
    for action in (one.apply, one.reverse, one.differing):
        with pytest.raises(UserError, match="neither SGLang 9.9.9 as released nor with a patch of Aerie"):
            action()
    assert state(site) == before


def test_a_file_patched_by_hand_is_recognised(site: Path, patches: Path) -> None:
    (site / RUNNER).write_text(PATCHED)
    one = Installation(site, "9.9.9", patches)
    assert one.differing() == [CODE, RECORD]
    assert one.apply() and (site / RUNNER).read_text() == PATCHED
    assert one.reverse() and (site / RUNNER).read_text() == ORIGINAL


def test_another_version_is_refused_naming_both(site: Path, patches: Path) -> None:
    before = state(site)
    with pytest.raises(UserError, match=r"SGLang 9\.9\.8 is installed .* patches for 9\.9\.9"):
        Installation(site, "9.9.8", patches)
    assert state(site) == before


def test_code_that_does_not_import_is_taken_back(site: Path, patches: Path) -> None:
    before = state(site)
    (patches / "hidden_state_dump.py").write_text("raise RuntimeError('no such day')\n")
    with pytest.raises(UserError, match="does not import with the patch, so it was taken back: RuntimeError: no such day"):
        Installation(site, "9.9.9", patches).apply()
    assert state(site) == before


def test_nothing_is_half_applied_when_a_file_cannot_be_written(site: Path, patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = state(site), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "model_runner" in path.name:
            write(path, content[:3])
            raise OSError(28, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Installation(site, "9.9.9", patches).apply()
    assert state(site) == before


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_each_patch_is_a_few_lines_that_only_call_the_hook(version: str) -> None:
    files = parse_patch((ROOT / "patches" / f"sglang-{version}" / "hidden_state_dump.patch").read_text())
    assert list(files) == [RUNNER]
    added = [line for hunk in files[RUNNER] for line in hunk.new if line not in hunk.old]
    removed = [line for hunk in files[RUNNER] for line in hunk.old if line not in hunk.new]
    assert not removed and len([line for line in added if line.strip()]) <= 8
    assert sum("SGLANG_HS_DUMP_DIR" in line for line in added) == 2  # both calls are behind the switch


def test_the_installed_sglang_in_both_directions(tmp_path: Path) -> None:
    """The real file of this environment, in a copy of its folder: the patch fits it and comes off without a trace."""
    found = metadata.distribution("sglang")
    source = Path(str(found.locate_file("")))
    for path in (RUNNER, RECORD):
        if (source / path).exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, tmp_path / path)
    one = Installation(tmp_path, found.version)
    plain = one.unpatched()[RUNNER]
    one._remove({RUNNER: plain})
    assert "hidden_state_dump" not in plain and one.differing() == [CODE, RUNNER, RECORD]
    one._install(one.wanted())
    assert one.differing() == []
    assert "hidden_state_dump.refuse(self.server_args)" in (tmp_path / RUNNER).read_text()
    compile((tmp_path / RUNNER).read_text(), RUNNER, "exec")


def run_script(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """scripts/00_apply_patch.sh as a user runs it, from another directory."""
    return subprocess.run([str(ROOT / "scripts" / "00_apply_patch.sh"), *words], cwd="/", env=os.environ | {"PY": sys.executable} | environ, capture_output=True, text=True, check=False)


def test_the_script_says_whether_this_version_is_installed() -> None:
    done = run_script("--check")
    differs = Installation.active().differing()
    assert done.returncode == (1 if differs else 0)
    assert ("not this version" if differs else "exactly this version") in done.stdout and not done.stderr


def test_the_script_without_a_python_or_without_sglang(tmp_path: Path) -> None:
    done = run_script("--check", PY=str(tmp_path / "no-python"))
    assert done.returncode == 2 and done.stderr.startswith("error: no Python at") and len(done.stderr.splitlines()) == 1
    import venv

    venv.create(tmp_path / "empty", with_pip=False)
    done = run_script("--check", PY=str(tmp_path / "empty" / "bin" / "python"))
    assert done.returncode == 2 and "has no SGLang" in done.stderr and len(done.stderr.splitlines()) == 1


def test_no_word_of_ours_is_left_in_the_patched_lines_when_off() -> None:
    """With SGLANG_HS_DUMP_DIR unset the patched file does not even import our code: nothing of it runs per forward."""
    text = Installation.active().wanted()[RUNNER].decode()
    blocks = text.split('if os.environ.get("SGLANG_HS_DUMP_DIR"):')
    assert len(blocks) == 3 and "hidden_state_dump" not in blocks[0]
    for block in blocks[1:]:
        body = block.split("\n\n        " if "import" not in block[:200] else "\n        tic")[0]
        assert "hidden_state_dump" in body
    assert text.count("hidden_state_dump") == 3
    assert patching.HUNK.match("@@ -1,2 +1,3 @@")


def test_an_sglang_without_the_oracle_is_told_so(site: Path, patches: Path) -> None:
    one = Installation(site, "9.9.9", patches)
    with pytest.raises(UserError, match="SGLang 9.9.9 cannot answer with auxiliary states"):
        refuse_without_oracle(one)
    (site / "sglang" / "srt" / "server_args.py").write_text("enable_return_aux_hidden_states = False\n")
    refuse_without_oracle(one)
