#!/usr/bin/env python3
"""Programs of one's own, by the commands a user types: lockstep new, compare and report.

usage: own_programs_test.py BUILD_FOLDER [TEST ...]
"""

import csv
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import unittest

from scratch import ScratchTest

BUILD = pathlib.Path(sys.argv[1]).resolve()
BIN = BUILD / "bin"
LOCKSTEP = BIN / "lockstep"
TINY = ["--steps", "4", "--batch", "4", "--dim", "8", "--hidden", "8"]


def run(*command, **more):
    """What a command did. Only CTest's time limit ends one that hangs."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)


class OwnPrograms(ScratchTest):
    def lockstep(self, *words):
        return run(LOCKSTEP, *words, cwd=self.folder)

    def done(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def refused(self, result, *parts, code=2):
        """The request was at fault: the message says so and what to do."""
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertIn("help: ", result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def record(self, name, *flags):
        path = self.folder / name
        self.done(run(BIN / "practical5_dp", "--devices", "cpu:2", *TINY, "--quiet", "--json", path, *flags))
        return path

    def rows(self, *path):
        with open(self.folder.joinpath(*path), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


class NewProgram(OwnPrograms):
    """From `lockstep new` to the first report. The folder is the same each time, for ccache."""

    def test_it_builds_trains_and_is_reported(self):
        self.folder = BUILD / "new_program_test"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        said = self.done(self.lockstep("new", "mine"))
        project = self.folder / "mine"
        self.assertEqual({path.name for path in project.iterdir()},
                         {"main.cpp", "CMakeLists.txt", "CMakePresets.json", "README.md", ".gitignore"})
        readme = (project / "README.md").read_text(encoding="utf-8")
        commands = readme.split("```\n")[1].splitlines()
        self.assertEqual(len(commands), 3)
        for command in commands:
            self.assertIn(command, said)

        environment = dict(os.environ)
        if ccache := shutil.which("ccache"):
            environment.update(CMAKE_CXX_COMPILER_LAUNCHER=ccache, CXXFLAGS="-fpch-preprocess",
                               CCACHE_SLOPPINESS="pch_defines,time_macros,include_file_mtime,include_file_ctime")
        for command in commands:
            self.done(run("sh", "-c", command, cwd=project, env=environment))
        record = json.loads((project / "run.json").read_text(encoding="utf-8"))
        self.assertEqual((record["program"], record["world_size"]), ("mine", 2))
        self.assertLess(record["losses"][-1], record["losses"][0])
        for name in ("report.html", "report.pdf", "report.md", "time.csv", "communication.csv", "records/run.json"):
            self.assertTrue((project / "report" / name).is_file(), name)
        self.assertEqual([row["rows"] for row in self.rows("mine", "report", "devices.csv")], ["32", "32"])

    def test_every_template_is_written(self):
        examples = {"ddp": "practical6_ddp", "dp": "practical5_dp", "accumulation": "practical7_accumulation",
                    "amp": "practical7_amp", "pipeline": "practical10_hybrid", "plain": "tutorial_measured"}
        for template, example in examples.items():
            self.done(self.lockstep("new", f"my_{template}/", "--template", template))
            main = (self.folder / f"my_{template}" / "main.cpp").read_text(encoding="utf-8")
            self.assertNotIn(example, main)
            self.assertIn("lockstep::run_program", main)
            lists = (self.folder / f"my_{template}" / "CMakeLists.txt").read_text(encoding="utf-8")
            library = "lockstep::lockstep" if template == "plain" else "lockstep::course"
            self.assertIn(f"target_link_libraries(my_{template} PRIVATE {library})", lists)

    def test_an_existing_folder_stays_as_it_is(self):
        (self.folder / "mine").mkdir()
        (self.folder / "mine" / "main.cpp").write_text("mine", encoding="utf-8")
        self.refused(self.lockstep("new", "mine"), "mine exists already")
        self.assertEqual((self.folder / "mine" / "main.cpp").read_text(encoding="utf-8"), "mine")
        self.assertEqual(len(list((self.folder / "mine").iterdir())), 1)

    def test_bad_requests_make_nothing(self):
        for name in ("1st", "my program", "a;b", ".", "test", "x" * 65, "größe"):
            self.refused(self.lockstep("new", name), "cannot be the name of a program")
        self.refused(self.lockstep("new", "mine", "--template", "dpp"), "no template \"dpp\"", "did you mean")
        self.refused(self.lockstep("new", "nowhere/mine"), "cannot make the folder nowhere/mine")
        self.refused(self.lockstep("new"), "NAME")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_without_the_development_files_their_package_is_named(self):
        """As with Debian's package lockstep alone."""
        (self.folder / "bin").mkdir()
        shutil.copy(LOCKSTEP, self.folder / "bin")
        said = run(self.folder / "bin" / "lockstep", "new", "mine", cwd=self.folder)
        self.refused(said, "has no CMake package", "apt-get install liblockstep-dev")
        self.assertFalse((self.folder / "mine").exists())


class Compare(OwnPrograms):
    def test_programs_with_records(self):
        program = [BIN / "practical5_dp", "--devices", "cpu:2", *TINY, "--quiet"]
        said = self.done(self.lockstep(
            "compare", "--runs", "2", "--out", "out", "--names", "wide,narrow,ranks", "--title", "Widths", "--", *program,
            "--hidden", "16", "vs", *program, "vs",
            "lockstep", "run", "-n", "2", "--quiet", BIN / "practical6_ddp", *TINY, "--quiet"))
        self.assertIn("Which is faster, from start to end?", said)
        self.assertIn("Which takes less time for a step?", said)
        self.assertEqual([(row["command"], row["runs"]) for row in self.rows("out", "wall.csv")],
                         [("wide", "2"), ("narrow", "2"), ("ranks", "2")])
        self.assertEqual([row["ranks"] for row in self.rows("out", "runs.csv")], ["1", "1", "2"])
        names = {path.name for path in (self.folder / "out" / "records").iterdir()}
        self.assertEqual(names, {f"{number}-{name}-run{run}.json" for number, name in
                                 enumerate(("wide", "narrow", "ranks"), start=1) for run in (1, 2)})
        for name in ("report.html", "report.pdf", "report.md"):
            self.assertTrue((self.folder / "out" / name).is_file(), name)
        self.assertIn("Widths", (self.folder / "out" / "report.md").read_text(encoding="utf-8"))

        before = (self.folder / "out" / "report.html").read_bytes()
        (self.folder / "out" / "report.html").unlink()
        self.done(self.lockstep("report", "out"))
        self.assertEqual((self.folder / "out" / "report.html").read_bytes(), before, "made again from what was kept")

    def test_any_program_is_timed(self):
        said = self.done(self.lockstep("compare", "--runs", "2", "sleep", "0.05", "vs", "sleep", "0.5"))
        self.assertRegex(said, r"sleep 0.05 is [0-9.]+ ± [0-9.]+ times faster than sleep 0.5\.")
        self.assertIn("Without a record", said)
        self.assertTrue((self.folder / "reports" / "compare" / "compare.json").is_file())

    def test_a_program_that_fails(self):
        said = self.lockstep("compare", "--runs", "2", "--out", "out", "--", "true", "vs", "sh", "-c",
                             "echo one; echo the reason >&2; exit 3")
        self.refused(said, "sh ended with exit code 3", "the reason", "is in out", code=1)
        told = self.lockstep("compare", "--out", "out", "--", "true", "vs", "sh", "-c", "echo only here; exit 2")
        self.refused(told, "sh ended with exit code 2", "only here")

    def test_bad_requests_run_nothing(self):
        mark = ["sh", "-c", "touch ran"]
        self.refused(self.lockstep("compare"), "vs is missing")
        self.refused(self.lockstep("compare", "--", *mark), "vs is missing", "vs ./mine --b")
        self.refused(self.lockstep("compare", "--", *mark, "vs"), "no command on one side")
        self.refused(self.lockstep("compare", "--", *mark, "vs", "./nothing"), "there is no program ./nothing")
        self.refused(self.lockstep("compare", "--runs", "1", "--", *mark, "vs", "true"), "--runs")
        self.refused(self.lockstep("compare", "--names", "a", "--", *mark, "vs", "true"), "1 name for 2 commands")
        (self.folder / "file").touch()
        self.refused(self.lockstep("compare", "--out", "file", "--", *mark, "vs", "true"), "the folder file")
        self.assertFalse((self.folder / "ran").exists())


class Report(OwnPrograms):
    def test_a_lab_is_reported_again(self):
        self.done(self.lockstep("lab", "5", "--out", "lab", "--quick", "--devices", "cpu:2", *TINY))
        before = (self.folder / "lab" / "report.html").read_bytes()
        self.done(self.lockstep("report", "lab", "--out", "again"))
        self.assertEqual((self.folder / "again" / "report.html").read_bytes(), before)
        self.assertEqual({path.name for path in (self.folder / "again" / "records").iterdir()},
                         {path.name for path in (self.folder / "lab" / "records").iterdir()})
        self.done(self.lockstep("report", "again", "--author", "Ada Lovelace", "--title", "Mine"))
        page = (self.folder / "again" / "report.html").read_text(encoding="utf-8")
        self.assertIn("Ada Lovelace", page)
        self.assertIn("Mine", page)
        self.done(self.lockstep("report", "again"))
        self.assertIn("Ada Lovelace", (self.folder / "again" / "report.html").read_text(encoding="utf-8"), "kept")

        next((self.folder / "again" / "records").iterdir()).unlink()
        self.refused(self.lockstep("report", "again"), "records/")
        (self.folder / "lab" / "lab.json").write_text('{"schema": 9}', encoding="utf-8")
        self.refused(self.lockstep("report", "lab"), "schema 9")

    def test_records_of_any_program(self):
        self.record("before-run1.json")
        self.record("before-run2.json")
        self.record("after.json", "--batch", "7")
        self.done(self.lockstep("report", "before-run1.json", "before-run2.json", "after.json", "--out", "out"))
        self.assertEqual([(row["run"], row["runs"]) for row in self.rows("out", "time.csv")],
                         [("before", "2"), ("after", "1")])
        self.assertEqual([row["rows"] for row in self.rows("out", "devices.csv")], ["2", "2", "4", "3"])
        self.assertTrue((self.folder / "out" / "records" / "after.json").is_file())

        self.done(self.lockstep("report", "out/records", "--out", "folder"))
        self.assertEqual([row["run"] for row in self.rows("folder", "time.csv")], ["after", "before"])

    def test_a_record_by_the_variable(self):
        environment = dict(os.environ, LOCKSTEP_RECORD=str(self.folder / "run.json"))
        self.done(run(LOCKSTEP, "run", "-n", "2", "--quiet", BIN / "tutorial_measured", "32", env=environment))
        record = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        self.assertEqual((record["program"], record["world_size"], record["split"], record["effective_batch"]),
                         ("tutorial_measured", 2, [128, 128], 256))
        self.assertEqual(record["options"]["width"], "32")
        self.assertEqual(len(record["ranks"]), 2)
        self.assertEqual(len(record["losses"]), 40)
        self.assertGreater(record["all_reduces"]["count"], 0)
        self.done(self.lockstep("report", "run.json"))
        self.assertTrue((self.folder / "reports" / "own" / "report.pdf").is_file())

    def test_bad_requests(self):
        (self.folder / "empty").mkdir()
        self.refused(self.lockstep("report", "empty"), "no record in the folder empty", "--json")
        self.refused(self.lockstep("report", "nothing.json"), "no file or folder nothing.json")
        self.refused(self.lockstep("report"), "RECORDS")
        (self.folder / "text.json").write_text("hello", encoding="utf-8")
        self.refused(self.lockstep("report", "text.json"), "text.json")
        (self.folder / "other.json").write_text('{"name": 1}', encoding="utf-8")
        self.refused(self.lockstep("report", "other.json"), "other.json")
        record = json.loads(self.record("run.json").read_text(encoding="utf-8"))
        record["schema"] = 99
        (self.folder / "new.json").write_text(json.dumps(record), encoding="utf-8")
        self.refused(self.lockstep("report", "run.json", "new.json"), "new.json", "99")
        (self.folder / "file").touch()
        self.refused(self.lockstep("report", "run.json", "--out", "file"), "the folder file")
        self.assertFalse((self.folder / "reports").exists())

    @unittest.skipIf(os.geteuid() == 0, "root may write everywhere")
    def test_a_folder_that_may_not_be_written(self):
        self.record("run.json")
        locked = self.folder / "locked"
        locked.mkdir()
        locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
        self.refused(self.lockstep("report", "run.json", "--out", "locked"), "locked", "--out")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
