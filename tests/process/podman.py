"""Podman without a daemon, a registry or a store of its user: images are built and run for real in a folder.

The Dockerfile's base cannot be pulled everywhere. Debian's own python3, put together by debootstrap, stands
in for it under its name, so that nothing in the Dockerfile changes. How this machine's pip finds packages
(certificates, a folder of wheels) is mounted while the image is built, and is not in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.events import Event, parse_event

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
DEBIAN = "bookworm"
NEEDED = ("podman", "debootstrap", "runc")
BUILD_S = 1800.0
"""On two busy cores; torch is most of it."""


def base_image() -> str:
    """What the Dockerfile starts from."""
    found = re.search(r"^FROM (\S+) AS base$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found, "the Dockerfile has no base"
    return found[1]


class Podman:
    """Images and containers in `folder`. Skips the test where they cannot be had, and says why."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("containers are run by root here")
        if missing := [name for name in NEEDED if shutil.which(name) is None]:
            pytest.skip(f"no {' and no '.join(missing)}: apt-get install buildah {' '.join(NEEDED)}")
        self._folder = folder
        runtime = shutil.which("runc")
        self._words = [
            "podman", "--log-level", "fatal", "--runtime", str(runtime), "--cgroup-manager", "cgroupfs",
            "--storage-driver", "overlay", "--root", str(folder / "store"),
            "--runroot", str(folder / "run"), "--tmpdir", str(folder / "tmp"),
        ]  # fmt: skip
        self._environment = {k: v for k, v in os.environ.items() if k != "CONTAINERS_STORAGE_CONF"}
        self._environment["BUILDAH_ISOLATION"] = "chroot"

    def __call__(self, *words: str, limit_s: float = 120.0, check: bool = True) -> str:
        """What `podman WORDS` prints on both streams, in order."""
        code, said = self.code(*words, limit_s=limit_s)
        assert code == 0 or not check, f"podman {' '.join(words)} ended with {code}\n{said}"
        return said

    def code(self, *words: str, limit_s: float = 120.0) -> tuple[int, str]:
        """Its exit code, too."""
        done = subprocess.run(
            [*self._words, *words], env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=limit_s,
        )  # fmt: skip
        return done.returncode, done.stdout

    # -- images -----------------------------------------------------------------------------------

    def make_base(self, name: str) -> None:
        """Debian's python3 as the image `name`, if there is none yet."""
        if self.code("image", "exists", name)[0] == 0:
            return
        root = self._folder / "rootfs"
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        fast = ["eatmydata"] if shutil.which("eatmydata") else []
        subprocess.run(
            [*fast, "debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN, str(root)],
            check=True, stdout=subprocess.DEVNULL, timeout=BUILD_S,
        )  # fmt: skip
        for unwanted in ("usr/lib/python3*/EXTERNALLY-MANAGED", "var/cache/apt/archives/*.deb"):
            for path in root.glob(unwanted):
                path.unlink()
        for link in ("python", "python3"):
            (root / "usr/local/bin" / link).symlink_to("/usr/bin/python3")
        archive = self._folder / "base.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=BUILD_S)
        shutil.rmtree(root)
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self("import", "--change", f"ENV {path}", "--change", "ENV LANG=C.UTF-8", str(archive), name)
        archive.unlink()

    def build(self, tag: str, *words: str) -> str:
        """Build the Dockerfile; what that printed."""
        wheels = _pip("find-links")
        mounts = {_certificates(): "/etc/ssl/certs/ca-certificates.crt"}
        settings = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt"]
        if wheels and Path(wheels).is_dir():
            mounts[wheels] = wheels
            settings.append(f"find-links = {wheels}")
            if any(Path(wheels).glob("torch-*+cpu-*.whl")):
                words = (*words, "--build-arg", "CPU_INDEX=")
        (self._folder / "pip.conf").write_text("\n".join(settings) + "\n")
        mounts[str(self._folder / "pip.conf")] = "/etc/pip.conf"
        volumes = [f"--volume={here}:{there}:ro" for here, there in mounts.items()]
        return self(
            # OCI's own format has no health check.
            "build", "--format", "docker", "--isolation", "chroot", "--network", "host", "--pull=never",
            "--layers", *volumes, *words, "--tag", tag, str(ROOT), limit_s=BUILD_S,
        )  # fmt: skip

    def inspect(self, name: str) -> dict[str, Any]:
        """All that is known of an image or a container."""
        return json.loads(self("inspect", name))[0]

    # -- containers -------------------------------------------------------------------------------

    def start(self, name: str, image: str, *words: str, options: Sequence[str] = ()) -> None:
        """`podman run` in the background."""
        limits = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
        self("run", "--detach", "--name", name, "--log-driver", "k8s-file", *limits, *options, image, *words)

    def once(self, image: str, *words: str, options: Sequence[str] = ()) -> tuple[int, str]:
        """`podman run` until it ends: exit code and output."""
        limits = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
        quiet = ["--rm", "--no-healthcheck", "--network", "none"]
        return self.code("run", *quiet, *limits, *options, image, *words)

    def events(self, name: str) -> list[Event]:
        """What a container said; every line of it has to be an event."""
        found = []
        for line in self("logs", name).splitlines():
            event = parse_event(line)
            assert event is not None, f"{name} says what is no event: {line}"
            found.append(event)
        return found

    def well(self, name: str) -> bool:
        """What its health check says now; where systemd is, it is asked without us, too."""
        return self.code("healthcheck", "run", name)[0] == 0

    def close(self) -> None:
        """No container runs on, and no volume is kept."""
        for name in self("ps", "--all", "--quiet").split():
            self("rm", "--force", "--depend", "--ignore", "--time", "0", name)
        self("volume", "rm", "--all", "--force")


def remove(folder: Path) -> None:
    """A store, and what is mounted in it: podman binds a part of it to itself."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in reversed([place for place in mounted if place.startswith(f"{folder}/")]):
        subprocess.run(["umount", place], check=True)
    shutil.rmtree(folder)


def _pip(key: str) -> str:
    """A setting of this machine's pip; empty if it has none."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", f"global.{key}"], capture_output=True, text=True
    )
    return done.stdout.strip() or os.environ.get(f"PIP_{key.replace('-', '_').upper()}", "")


def _certificates() -> str:
    """What this machine trusts."""
    for path in ("/etc/ssl/certs/ca-certificates.crt", ssl.get_default_verify_paths().cafile):
        if path and Path(path).is_file():
            return str(Path(path).resolve())
    pytest.skip("this machine has no certificates for the image to trust")
