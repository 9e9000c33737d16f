"""The backends' suite over MPI: starts the test program under mpirun, once for each number of ranks.

usage: run_mpi_suite.py PROGRAM --gtest_filter=SUITE.* [--gtest_output=xml:FILE]

All ranks of a job go through the same tests. Where a rank is killed or stopped, each run of each test gets a job of its
own, which mpirun does not end with that rank. Exits with 77 (skipped) where there is no mpirun.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

LETHAL = "BackendProcesses"
RUNS = 2  # most of one such test
PATIENCE_S = 240


def tests_of(program, chosen):
    """{ranks: [full names of tests]}"""
    listed = subprocess.run([program, chosen, "--gtest_list_tests"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found, suite = {}, ""
    for line in listed.splitlines():
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = word
            continue
        ranks = re.search(r"/mpi_(\d+)_", word)
        if ranks:
            found.setdefault(int(ranks.group(1)), []).append(suite + word)
    return found


def run_job(program, ranks, names, output, only_run=None):
    """Runs these tests as one job, or only one run of each. Rank 0 writes the results."""
    lethal = only_run is not None
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LOCKSTEP_TEST_FACTS": os.path.join(folder, "facts"),
                       "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "LSAN_OPTIONS": "detect_leaks=0"}  # Open MPI leaks, in plugins that are gone when leaks are found
        if lethal:
            environment["LOCKSTEP_TEST_RUN"] = str(only_run)
        rank = [program, "--gtest_filter=" + ":".join(names)]
        first = rank + ([f"--gtest_output=xml:{output}"] if output else [])
        command = ["mpirun", "--oversubscribe", "--bind-to", "none"]
        command += ["--enable-recovery"] if lethal else []
        command += ["-n", "1", *first] + ([":", "-n", str(ranks - 1), *rank] if ranks > 1 else [])
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               timeout=PATIENCE_S)
    failed = re.search(r"\[  FAILED  \]|did not start|watchdog", ended.stdout) or "[  PASSED  ]" not in ended.stdout
    if failed or (ended.returncode != 0 and not lethal):
        print(ended.stdout[-8000:])
        print(f"FAIL: {' '.join(names[:3])}: mpirun ended with {ended.returncode}")
        return False
    print(f"ok: {len(names)} tests with {ranks} ranks")
    return True


def main():
    program, chosen, *rest = sys.argv[1:]
    if shutil.which("mpirun") is None:
        print("SKIP: there is no mpirun here (apt-get install openmpi-bin)")
        sys.exit(77)
    output = rest[0].split(":", 1)[1] if rest else ""
    good, jobs = True, 0
    for ranks, names in sorted(tests_of(program, chosen).items()):
        lethal = LETHAL in names[0]
        for part, run in ([([name], run) for name in names for run in range(RUNS)] if lethal else [(names, None)]):
            jobs += 1
            results = output.replace(".xml", f".{jobs}.xml") if not run else ""  # a test counts once
            good = run_job(program, ranks, part, results, run) and good
    sys.exit(0 if good and jobs else 1)


main()
