#!/usr/bin/env python3
"""The Debian packages in a fresh Debian 12: they install with their dependencies, work, serve other projects by CMake
and pkg-config, and leave nothing behind.

usage: package_test.py REPO_FOLDER CACHE_FOLDER [TEST ...]

Takes several minutes and needs root, debootstrap and the network, so it runs only if LOCKSTEP_TEST_PACKAGES=1; else it is
skipped. LOCKSTEP_DEBIAN_MIRROR names another mirror. CACHE_FOLDER keeps the fresh system and the packages apt
fetched, so that only the first run needs them from the network.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

from building_page import page_project

REPO, CACHE = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
MIRROR = os.environ.get("LOCKSTEP_DEBIAN_MIRROR", "http://deb.debian.org/debian")
PACKAGES = ["liblockstep-core0", "liblockstep0", "lockstep", "liblockstep-dev"]
COMPILERS = ["g++", "cmake", "ninja-build", "pkg-config"]
SMALL = "--steps 2 --batch 4 --dim 4 --hidden 4"
SKIPPED = 77

# Everything a command mounts or starts ends with it.
ENTER = """
set -e
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/dev/shm"
mount -t proc proc "$0/proc"
mount --bind "$1/archives" "$0/var/cache/apt/archives"
root=$0; user=$2; shift 2
exec chroot --userspec="$user" "$root" /usr/bin/env -i HOME=/home/student PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \\
  DEBIAN_FRONTEND=noninteractive sh -c "$@"
"""


def skip(reason):
    print(reason)
    sys.exit(SKIPPED)


def check_requirements():
    if os.environ.get("LOCKSTEP_TEST_PACKAGES") != "1":
        skip("packages in a fresh Debian: only with LOCKSTEP_TEST_PACKAGES=1, since it takes minutes")
    if os.geteuid() != 0:
        skip("packages in a fresh Debian: needs root")
    for tool in ("debootstrap", "dpkg-deb", "dpkg-shlibdeps", "unshare", "readelf"):
        if shutil.which(tool) is None:
            skip(f"packages in a fresh Debian: {tool} is not installed")
    try:
        urllib.request.urlopen(f"{MIRROR}/dists/bookworm/Release", timeout=20).close()
    except (urllib.error.URLError, OSError) as error:
        skip(f"packages in a fresh Debian: {MIRROR} cannot be reached: {error}")


def fresh_debian(root):
    """A minimal Debian 12 in the folder, as debootstrap leaves it."""
    base = CACHE / "bookworm"
    if not base.exists():
        unfinished = CACHE / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", unfinished, MIRROR], check=True,
                       stdout=subprocess.DEVNULL)
        unfinished.rename(base)
    subprocess.run(["cp", "-a", "--reflink=auto", base, root], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    (root / "usr" / "sbin" / "policy-rc.d").write_text("#!/bin/sh\nexit 101\n")  # no services
    (root / "usr" / "sbin" / "policy-rc.d").chmod(0o755)
    (root / "etc" / "apt" / "apt.conf.d" / "50test").write_text('APT::Keep-Downloaded-Packages "true";\n'
                                                              'APT::Sandbox::User "root";\n')
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "test").write_text("force-unsafe-io\n")  # nobody needs this disk after a crash
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")


class Packages(unittest.TestCase):
    """Tests run in the order of their names; the first installs, the last removes."""

    @classmethod
    def setUpClass(cls):
        made = subprocess.run([REPO / "scripts" / "package", "--no-install"], capture_output=True, text=True)
        if made.returncode != 0:
            raise AssertionError(f"scripts/package failed:\n{made.stdout[-3000:]}{made.stderr}")
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        (CACHE / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        cls.root = pathlib.Path(scratch.name) / "root"
        fresh_debian(cls.root)
        (cls.root / "debs").mkdir()
        for path in (REPO / "build" / "package").glob("*.deb"):
            shutil.copy(path, cls.root / "debs")
        cls.inside("useradd --create-home student && apt-get -q update", user="root")
        project = cls.root / "home" / "student" / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(page_project(REPO, "find_package(lockstep"), encoding="utf-8")
        shutil.copy(REPO / "examples" / "tutorial_distributed.cpp", project / "train.cpp")
        cls.inside("chown -R student /home/student", user="root")

    @classmethod
    def inside(cls, command, user="student"):
        """Runs a shell command in the fresh system; what it printed."""
        numbers = "1000:1000" if user == "student" else "0:0"
        ended = subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, cls.root, CACHE,
                                numbers, f"cd /home/student 2>/dev/null; {command}"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode != 0:
            raise AssertionError(f"{command}\nended with {ended.returncode}:\n{ended.stdout[-4000:]}")
        return ended.stdout

    def install(self, names, more=()):
        debs = [f"/debs/{path.name}" for path in (self.root / "debs").iterdir() if path.name.split("_")[0] in names]
        self.assertEqual(len(debs), len(names))
        self.inside(f"apt-get -q -y --no-install-recommends install {' '.join([*debs, *more])}", user="root")

    def files_of(self, package):
        return self.inside(f"dpkg-query -L {package}").split()

    def test_1_the_library_without_torch_installs_alone(self):
        self.install(["liblockstep-core0"])
        installed = self.inside("dpkg-query -W -f '${Package}\\n'").split()
        self.assertNotIn("libtorch1.13", installed)
        self.assertIn("libgloo0", installed, "the module for several hosts needs it")

    def test_2_the_command_installs_and_finds_a_healthy_machine(self):
        self.install(["liblockstep0", "lockstep"])
        installed = self.inside("dpkg-query -W -f '${Package}\\n'").split()
        self.assertIn("libopenblas0-openmp", installed)
        self.assertNotIn("libtorch-dev", installed)
        doctor = self.inside("lockstep doctor")
        self.assertIn("openblas-openmp", doctor)

    def test_3_ranks_train(self):
        self.inside(f"lockstep run -n 2 practical6_ddp {SMALL}")
        self.inside(f"lockstep run -n 2 --backend gloo practical6_ddp {SMALL}")

    def test_4_a_lab_makes_its_report(self):
        self.inside("lockstep lab 5 --quick --out /home/student/lab5")
        for name in ("report.pdf", "report.html", "report.md"):
            self.assertGreater((self.root / "home" / "student" / "lab5" / name).stat().st_size, 1000)

    def test_5_another_project_is_built_with_cmake(self):
        self.install(["liblockstep-dev"], COMPILERS)
        self.inside("cmake -S project -B project/build -G Ninja && cmake --build project/build")
        self.assertIn("step 9: loss", self.inside("lockstep run -n 2 project/build/train"))
        self.assertIn("step 9: loss", self.inside("lockstep run -n 2 --backend gloo project/build/train"))

    def test_6_and_with_pkg_config(self):
        self.inside("g++ project/train.cpp -o train $(pkg-config --cflags --libs lockstep)")
        self.assertIn("step 9: loss", self.inside("./train"))
        listed = self.inside("readelf -d train")
        self.assertIn("liblockstep.so.0", listed)
        self.assertNotRegex(listed, "RPATH|RUNPATH")

    def test_7_a_program_of_ones_own_is_built(self):
        self.inside("lockstep new mine && cd mine && cmake --preset default -G Ninja && cmake --build build && "
                    f"lockstep run -n 2 build/mine {SMALL}")

    def test_8_what_they_hold_is_as_debian_wants_it(self):
        programs = {path for path in self.files_of("lockstep") if path.startswith("/usr/bin/")}
        self.assertEqual(programs, {"/usr/bin/lockstep"})
        self.assertLessEqual({"/usr/share/man/man1/lockstep.1.gz", "/usr/share/bash-completion/completions/lockstep",
                              "/usr/share/zsh/vendor-completions/_lockstep"}, set(self.files_of("lockstep")))
        for package in PACKAGES:
            files = self.files_of(package)
            self.assertIn(f"/usr/share/doc/{package}/copyright", files)
            self.assertIn(f"/usr/share/doc/{package}/changelog.Debian.gz", files)
            for path in files:
                inside = self.root / path[1:]
                if inside.is_symlink() or not inside.is_file() or inside.read_bytes()[:4] != b"\x7fELF":
                    continue
                listed = subprocess.run(["readelf", "-d", inside], check=True, capture_output=True, text=True).stdout
                self.assertNotRegex(listed, "RPATH|RUNPATH", path)
                soname = re.search(r"\(SONAME\).*\[(.*)\]", listed)
                if inside.parent == self.root / "usr" / "lib" / "x86_64-linux-gnu":
                    self.assertRegex(soname.group(1), r"^liblockstep(-core)?\.so\.0$")

    def test_9_they_are_removed_without_a_trace(self):
        files = {path for package in PACKAGES for path in self.files_of(package)}
        self.inside(f"apt-get -q -y purge {' '.join(PACKAGES)}", user="root")
        self.assertEqual(self.inside("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n' | grep lockstep || true"), "")
        self.assertEqual(self.inside("dpkg --audit", user="root"), "")
        self.assertEqual(self.inside("ldconfig -p | grep lockstep || true", user="root"), "")
        left = [path for path in files if (self.root / path[1:]).is_file()]
        self.assertEqual(left, [])
        traces = self.inside("find / -xdev -name '*lockstep*' -not -path '/home/*' -not -path '/debs/*' -not -path '/proc/*' "
                             "-not -path '/var/cache/apt/*' -not -path '/var/lib/apt/*'", user="root")
        self.assertEqual(traces, "")


if __name__ == "__main__":
    check_requirements()
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], failfast=True, verbosity=2)
