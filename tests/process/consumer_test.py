#!/usr/bin/env python3
"""lockstep as other projects use it: installed, or as a folder of their own, with the CMake lines of docs/building.md.

usage: consumer_test.py CMAKE BUILD_FOLDER REPO_FOLDER [TEST ...]
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

from building_page import page_project

CMAKE, BUILD, REPO = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
LABS = ("5", "6", "7", "10", "homework2")
CACHE = (BUILD / "CMakeCache.txt").read_text()
SANITIZE = [f"-fsanitize={names}" for names in re.findall(r"^LOCKSTEP_SANITIZE:STRING=(.+)$", CACHE, re.MULTILINE)]
TORCH = re.search(r"^LOCKSTEP_TORCH:PATH=(.*)$", CACHE, re.MULTILINE).group(1)
HIDDEN = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("CLI11", "fmt", "OpenSSL", "Cairo", "GTest", "Torch")]
VERSION_PROGRAM = r"""
#include <cstdio>
#include <lockstep/version.hpp>
#if !LOCKSTEP_VERSION_CHECK(0, 0, 9) || !LOCKSTEP_VERSION_CHECK(0, 1, 0)
#error "this is older than it is"
#endif
static_assert(!LOCKSTEP_VERSION_CHECK(LOCKSTEP_VERSION_MAJOR + 1, 0, 0));
static_assert(!LOCKSTEP_VERSION_CHECK(LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR + 1, 0));
static_assert(!LOCKSTEP_VERSION_CHECK(LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR, LOCKSTEP_VERSION_PATCH + 1));
static_assert(LOCKSTEP_VERSION_CHECK(LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR, LOCKSTEP_VERSION_PATCH));
int main() {
  std::printf("%d.%d.%d %s", LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR, LOCKSTEP_VERSION_PATCH, lockstep::kVersion);
#ifdef WITH_TORCH
  std::printf(" %s", lockstep::describe_versions().at("libtorch").c_str());
#endif
}
"""


def run(*command, **more):
    """What a command did. Only CTest's time limit ends one that hangs."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Scratch(unittest.TestCase):
    """A folder of its own for a class of tests."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    def done(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout


class Installed(Scratch):
    """Installed to a prefix, which is then moved: neither the build nor the first place of the prefix is needed."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        subprocess.run([CMAKE, "--install", BUILD, "--prefix", cls.folder / "first"], check=True, capture_output=True)
        cls.prefix = (cls.folder / "first").rename(cls.folder / "prefix")
        cls.lockstep = cls.prefix / "bin" / "lockstep"
        project = cls.folder / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(page_project(REPO, "find_package(lockstep"), encoding="utf-8")
        shutil.copy(REPO / "examples" / "tutorial_distributed.cpp", project / "train.cpp")
        for command in ([CMAKE, "-S", project, "-B", project / "build", "-G", "Ninja",
                         f"-DCMAKE_PREFIX_PATH={cls.prefix}", *HIDDEN],
                        [CMAKE, "--build", project / "build"]):
            built = run(*command)
            if built.returncode != 0:
                raise AssertionError(f"the lines of docs/building.md do not build:\n{built.stdout}{built.stderr}")
        cls.program = project / "build" / "train"
        cls.module = next(cls.prefix.glob("lib*/**/lockstep-gloo.so"), None)

    def need_gloo(self):
        if self.module is None:
            self.skipTest("this lockstep was built without libgloo-dev")

    def test_a_program_of_another_project_trains(self):
        self.assertIn("step 9: loss", self.done(run(self.program)))

    def test_a_program_of_the_course_builds_elsewhere(self):
        """practical10_hybrid, which needs all of the course's helpers, as `lockstep new` copies it."""
        examples = {path.name for path in (self.prefix / "share" / "lockstep" / "examples").iterdir()}
        self.assertEqual(examples, {path.name for path in (REPO / "examples").glob("*.cpp")})
        self.done(run(self.lockstep, "new", "mine", "--template", "pipeline", cwd=self.folder))
        project = self.folder / "mine"
        self.assertIn(f'"{self.prefix}', (project / "CMakePresets.json").read_text(encoding="utf-8"))
        self.done(run(CMAKE, "--preset", "default", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None", cwd=project))
        self.done(run(CMAKE, "--build", project / "build"))
        trained = self.done(run(project / "build" / "mine", "--steps", "2", "--batch", "4", "--dim", "8", "--hidden", "8",
                                "--micro-batches", "2"))
        self.assertIn("mine", trained)

    def test_it_loads_gloo(self):
        self.need_gloo()
        self.assertIn("step 9: loss", self.done(run(self.lockstep, "run", "-n", "2", "--backend", "gloo", self.program)))

    def test_it_runs_on_two_hosts(self):
        """Two launchers, as on two hosts, whose rendezvous is this one's loopback address."""
        self.need_gloo()
        endpoint = f"127.0.0.1:{free_port()}"
        environment = dict(os.environ, LOCKSTEP_TOKEN="0123456789abcdef")
        jobs = [subprocess.Popen([self.lockstep, "run", "--nnodes", "2", "--node-rank", str(host), "--rdzv-endpoint",
                                  endpoint, "-n", "1", self.program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True, env=environment) for host in (0, 1)]
        for job in jobs:
            self.addCleanup(job.kill)
        results = [job.communicate() for job in jobs]
        for job, (out, err) in zip(jobs, results):
            self.assertEqual(job.returncode, 0, out + err)
        self.assertIn("step 9: loss", results[0][0])

    def test_a_missing_module_is_named_with_the_folders(self):
        self.need_gloo()
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir()
        shutil.move(self.module, elsewhere)
        try:
            failed = run(self.lockstep, "run", "-n", "2", "--backend", "gloo", self.program)
            self.assertEqual(failed.returncode, 2, failed.stderr)
            self.assertIn("LOCKSTEP_MODULE_PATH", failed.stderr)
            self.assertIn(str(self.module.parent), failed.stderr)
            named = dict(os.environ, LOCKSTEP_MODULE_PATH=str(elsewhere))
            self.done(run(self.lockstep, "run", "-n", "2", "--backend", "gloo", self.program, env=named))
        finally:
            shutil.move(elsewhere / self.module.name, self.module.parent)

    def test_every_lab_finds_its_programs(self):
        """A lab looks for its programs before it makes its folder, which it cannot make inside a file."""
        course = {path.name for pattern in ("practical*", "homework*") for path in (BUILD / "bin").glob(pattern)}
        self.assertLessEqual(course, {path.name for path in (self.prefix / "libexec" / "lockstep").iterdir()})
        a_file = self.folder / "file"
        a_file.touch()
        for lab in LABS:
            with self.subTest(lab=lab):
                failed = run(self.lockstep, "lab", lab, "--devices", "cpu:2", "--out", a_file / "report")
                self.assertEqual(failed.returncode, 2, failed.stderr)
                self.assertIn("cannot make the folder", failed.stderr)
        self.assertIn(", ".join(LABS), self.done(run(self.lockstep, "lab", "--help")))

    def test_a_program_of_the_course_runs_over_gloo(self):
        self.need_gloo()
        self.done(run(self.lockstep, "run", "-n", "2", "--backend", "gloo", "practical6_ddp",
                      "--steps", "2", "--batch", "4", "--dim", "4", "--hidden", "4"))

    def test_bin_holds_the_command_alone(self):
        """Other programs have generic names, which belong to no package."""
        self.assertEqual([path.name for path in (self.prefix / "bin").iterdir()], ["lockstep"])

    def test_no_run_path_leaves_the_prefix(self):
        """Except to a libtorch that is not the system's, and to the right BLAS where the system prefers another."""
        allowed = [re.escape(str(pathlib.Path(TORCH) / "lib"))] if TORCH else []
        if not re.search("openblas-openmp", os.path.realpath(next(pathlib.Path("/usr/lib").glob("*/libblas.so.3"), "/"))):
            allowed.append(r"/usr/lib/[^/]+/openblas-openmp")
        checked = 0
        for path in sorted(self.prefix.glob("**/*")):
            if not path.is_file() or path.read_bytes()[:4] != b"\x7fELF":
                continue
            checked += 1
            listed = self.done(run("readelf", "-d", path))
            for folder in ":".join(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", listed)).split(":"):
                self.assertRegex(folder, "|".join([r"^$", r"^\$ORIGIN(/|$)", *allowed]), path)
        self.assertGreater(checked, 8)

    def test_no_link_leads_out_of_the_prefix(self):
        for path in self.prefix.glob("**/*"):
            if path.is_symlink():
                self.assertTrue(path.resolve().is_relative_to(self.prefix.resolve()), f"{path} -> {os.readlink(path)}")

    def test_the_exported_targets_name_no_path_of_this_machine(self):
        found = list(self.prefix.glob("**/lockstep*Targets*.cmake"))
        self.assertGreaterEqual(len(found), 4)
        for path in found:
            self.assertNotRegex(path.read_text(), r'["; ]/[a-z]|fmt::|CLI11::|OpenSSL::', path)

    def configure(self, name, text, *flags):
        """Another small project that looks for the installed lockstep."""
        project = self.folder / name
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.25)\nproject({name} LANGUAGES CXX)\n{text}\n")
        (project / "version.cpp").write_text(VERSION_PROGRAM)
        return run(CMAKE, "-S", project, "-B", project / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={self.prefix}",
                   *HIDDEN, *flags)

    def other_torch(self, version):
        """A folder that looks like a libtorch of that version."""
        root = self.folder / f"torch-{version}"
        api = root / "include" / "torch" / "csrc" / "api" / "include" / "torch"
        api.mkdir(parents=True)
        (root / "lib").mkdir()
        (api / "torch.h").touch()
        major, minor, patch = version.split(".")
        (api / "version.h").write_text(f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
                                       f"#define TORCH_VERSION_PATCH {patch}\n")
        for library in ("torch", "torch_cpu", "c10"):
            (root / "lib" / f"lib{library}.so").touch()
        return root

    def test_another_libtorch_is_refused_with_a_remedy(self):
        other = self.other_torch("1.99.7")
        failed = self.configure("other", "find_package(lockstep REQUIRED)", f"-DLOCKSTEP_TORCH={other}")
        self.assertNotEqual(failed.returncode, 0)
        said = " ".join(failed.stderr.split())
        self.assertIn("is 1.99.7", said)
        self.assertIn("help: name a libtorch", said)
        optional = self.configure("optional", 'find_package(lockstep QUIET)\nmessage(STATUS "found: ${lockstep_FOUND}")',
                                  f"-DLOCKSTEP_TORCH={other}")
        self.assertRegex(self.done(optional), r"found: (0|FALSE)")

    def test_the_core_needs_no_libtorch(self):
        self.done(self.configure("core", "find_package(lockstep REQUIRED COMPONENTS core)\nadd_executable(v version.cpp)\n"
                                 "target_link_libraries(v PRIVATE lockstep::core)", "-DLOCKSTEP_TORCH=/nowhere"))
        build = self.folder / "core" / "build"
        self.done(run(CMAKE, "--build", build))
        header, library = self.done(run(build / "v")).split()
        self.assertEqual(header, library)
        self.assertNotIn("libtorch", self.done(run("readelf", "-d", build / "v")))

    def test_pkg_config_is_enough_for_a_command_line(self):
        if shutil.which("pkg-config") is None:
            self.skipTest("pkg-config is not installed")
        source = self.folder / "version.cpp"
        source.write_text(VERSION_PROGRAM)
        folder = next(self.prefix.glob("lib*/**/pkgconfig"))
        for package, macro in (("lockstep-core", "WITHOUT_TORCH"), ("lockstep", "WITH_TORCH")):
            flags = self.done(run("pkg-config", "--cflags", "--libs", package,
                                  env=dict(os.environ, PKG_CONFIG_PATH=str(folder)))).split()
            program = self.folder / package
            self.done(run("g++", f"-D{macro}", source, *SANITIZE, "-o", program, *flags))
            versions = self.done(run(program)).split()
            self.assertEqual(versions[0], versions[1])
            self.assertEqual(len(versions), 3 if macro == "WITH_TORCH" else 2)


class Subproject(Scratch):
    """lockstep inside another project. The library is not compiled again: the project is configured, and its own
    program compiled, with the flags that lockstep's targets give it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.folder / "CMakeLists.txt").write_text(page_project(REPO, "add_subdirectory(lockstep"), encoding="utf-8")
        (cls.folder / "lockstep").symlink_to(REPO)
        (cls.folder / "train.cpp").write_text("#include <lockstep/error.hpp>\n"
                                              "static_assert(__cplusplus >= 202002L);\n"
                                              "int main() {}\n")

    def configure(self, name, *flags):
        self.done(run(CMAKE, "-S", self.folder, "-B", self.folder / name, "-G", "Ninja", f"-DLOCKSTEP_TORCH={TORCH}",
                      "-DLOCKSTEP_CUDA=OFF", *flags))
        return self.folder / name

    def targets(self, build):
        """The programs, libraries and modules of a build."""
        listed = self.done(run("ninja", "-C", build, "-t", "targets", "all"))
        return {pathlib.Path(path).name for path in
                re.findall(r"^(\S+): CXX_(?:EXECUTABLE|STATIC_LIBRARY|SHARED_LIBRARY|MODULE_LIBRARY)_LINKER", listed, re.MULTILINE)}

    def test_it_brings_the_library_and_nothing_else(self):
        build = self.configure("alone")
        brought = self.targets(build) - {"lockstep-gloo.so", "lockstep-mpi.so"}  # where Gloo and MPI are installed
        self.assertEqual(brought, {"train", "liblockstep.a", "liblockstep-core.a"})
        self.assertFalse((build / "CTestTestfile.cmake").exists(), "the parent project got tests")
        installed = self.done(run(CMAKE, "--install", build, "--prefix", self.folder / "nothing"))
        self.assertEqual(list((self.folder / "nothing").glob("**/*.*")), [], installed)

    def test_its_users_are_compiled_as_cpp20(self):
        build = self.configure("flags", "-DCMAKE_CXX_STANDARD=17")
        self.done(run(CMAKE, "--build", build, "--target", "CMakeFiles/train.dir/train.cpp.o"))

    def test_a_shared_library_has_a_soname(self):
        build = self.configure("shared", "-DBUILD_SHARED_LIBS=ON")
        linked = self.done(run("ninja", "-C", build, "-t", "commands", "train"))
        for name in ("liblockstep.so.0", "liblockstep-core.so.0"):
            self.assertIn(f"-Wl,-soname,{name} ", linked)

    def test_it_brings_the_command_where_asked(self):
        build = self.configure("command", "-DLOCKSTEP_BUILD_PROGRAMS=ON")
        self.assertLessEqual({"lockstep", "lockstep-probe"}, self.targets(build))
        self.assertNotIn("practical6_ddp", self.targets(build))


class WithoutRoot(Scratch):
    """scripts/quickstart --prefix says what prevents it before it builds anything."""

    def refusal(self, prefix, **variables):
        failed = run(REPO / "scripts" / "quickstart", "--prefix", prefix, env=dict(os.environ, **variables))
        self.assertEqual(failed.returncode, 1, failed.stdout + failed.stderr)
        return failed.stderr

    def test_what_is_missing_is_named_with_remedies(self):
        said = self.refusal(self.folder / "new", CXX="/bin/false")
        self.assertIn("missing for the build: GCC 12 or newer", said)
        self.assertRegex(said, "help: an administrator: apt-get install .*g\\+\\+")
        self.assertRegex(said, "help: without root: conda create .*gxx")

    def test_a_prefix_that_cannot_be_written_is_refused(self):
        self.assertIn("help: name a folder of your own", self.refusal("/proc/lockstep"))


class CudaHeaders(Scratch):
    """Which folders of headers a build with CUDA gets, for folders laid out as pip and the toolkit lay them out."""

    def lay_out(self, name, *, pip_crt, toolkit_crt, toolkit_version=13000):
        root = self.folder / name
        pip, toolkit = root / "nvidia" / "cu13", root / "toolkit" / "include"
        for folder in (root / "torch", pip / "include", pip / "lib", toolkit):
            folder.mkdir(parents=True)
        (pip / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
        (toolkit / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {toolkit_version}\n")
        for library in ("libcudart.so.13", "libcublasLt.so.13"):
            (pip / "lib" / library).touch()
        for wanted, folder in ((pip_crt, pip / "include"), (toolkit_crt, toolkit)):
            if wanted:
                (folder / "crt").mkdir()
                (folder / "crt" / "host_defines.h").touch()
        (root / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(headers LANGUAGES NONE)\n"
            f'include("{REPO}/cmake/LockstepCuda.cmake")\nadd_library(runtime INTERFACE)\n'
            f'lockstep_add_cuda_runtime(runtime "{root}/torch" "{toolkit}")\n'
            "get_target_property(folders runtime INTERFACE_SYSTEM_INCLUDE_DIRECTORIES)\n"
            'message(STATUS "folders: ${folders}")\n')
        return run(CMAKE, "-S", root, "-B", root / "build", "-G", "Ninja"), pip / "include", toolkit

    def folders(self, result):
        line = re.search(r"folders: (.*)", self.done(result)).group(1)
        return [pathlib.Path(os.path.normpath(folder)) for folder in line.split(";")]

    def test_the_toolkit_completes_a_pip_torch(self):
        result, pip, toolkit = self.lay_out("completed", pip_crt=False, toolkit_crt=True)
        self.assertEqual(self.folders(result), [pip, toolkit])

    def test_complete_headers_are_left_alone(self):
        result, pip, _ = self.lay_out("complete", pip_crt=True, toolkit_crt=True)
        self.assertEqual(self.folders(result), [pip])

    def test_without_either_configuring_stops_with_a_remedy(self):
        result, _, _ = self.lay_out("neither", pip_crt=False, toolkit_crt=False)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("crt/host_defines.h", result.stderr)
        self.assertIn("nvidia-cuda-crt==13.0", result.stderr)

    def test_a_toolkit_of_another_cuda_is_refused(self):
        result, _, _ = self.lay_out("other", pip_crt=True, toolkit_crt=True, toolkit_version=12040)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("12.4", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
