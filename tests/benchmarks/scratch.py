"""A scratch git repository that knows nothing of the user's configuration."""

import os
import subprocess
from pathlib import Path

import pytest


class Scratch:
    """A repository with src/ and benchmarks/; commits get the dates they are told."""

    def __init__(self, root: Path) -> None:
        self.root = root / "repo"
        self.root.mkdir()
        home = root / "home"
        home.mkdir(exist_ok=True)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            **{f"GIT_{who}_NAME": "tester" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "tester@example.invalid" for who in ("AUTHOR", "COMMITTER")},
        }
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str, **env: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(
        self, files: dict[str, str], message: str = "change", date: str = "2026-01-01T00:00:00Z"
    ) -> str:
        for path, text in files.items():
            self.write(path, text)
        self.git("add", "-A")
        self.git(
            "commit", "-q", "--allow-empty", "-m", message, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date
        )
        return self.git("rev-parse", "HEAD")

    def unpack(self, commit: str, directory: Path, *paths: str) -> Path:
        """The files of a commit, without git, in `directory`."""
        directory.mkdir(parents=True)
        packed = subprocess.run(
            ["git", "archive", commit, *paths], cwd=self.root, env=self.env, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
        return directory


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """An empty scratch repository; git run by the code under test sees no configuration of the user's."""
    repository = Scratch(tmp_path)
    for name, value in repository.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GIT_DIR", raising=False)
    return repository
