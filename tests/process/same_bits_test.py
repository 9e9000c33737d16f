#!/usr/bin/env python3
"""`--virtual-shards` of the course's programs: the same bits on any number of ranks. same_bits_test.py BIN_FOLDER."""
import json
import os
import subprocess
import sys
import unittest

from scratch import ScratchTest

BIN = ""  # set by main
SIZES = ["--batch", "48", "--dim", "16", "--hidden", "32", "--seed", "3", "--quiet"]


def run(ranks, program, *words):
    return subprocess.run([os.path.join(BIN, "lockstep"), "run", "-n", str(ranks), os.path.join(BIN, program), *SIZES, *words],
                          capture_output=True, text=True, timeout=300)


def bytes_of(path):
    with open(path, "rb") as file:
        return file.read()


class SameBits(ScratchTest):
    def weights(self, ranks, program, *words):
        """The bytes of the trained weights, and the losses."""
        saved, record = self.path("weights.safetensors"), self.path("job.json")
        done = run(ranks, program, "--virtual-shards", "12", "--save", saved, "--json", record, *words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(record, encoding="utf-8") as file:
            return bytes_of(saved), json.load(file)["losses"]

    def test_every_number_of_ranks(self):
        for program, *words in (["practical6_ddp", "--steps", "50"],
                                ["practical6_ddp", "--steps", "20", "--model", "transformer", "--optimizer", "adamw"],
                                ["practical7_accumulation", "--steps", "20", "--accum-steps", "3"],
                                ["practical7_amp", "--steps", "20", "--amp", "bf16", "--master-weights"],
                                ["homework2_combined", "--steps", "20", "--accum-steps", "2", "--amp", "bf16",
                                 "--overflow-at", "5"]):
            alone = self.weights(1, program, *words)
            for ranks in (2, 3, 4):
                with self.subTest(program=program, ranks=ranks):
                    self.assertEqual(self.weights(ranks, program, *words), alone)
            with self.subTest(program=program, backend="gloo"):
                self.assertEqual(self.weights(4, program, "--backend", "gloo", *words), alone)

    def test_a_resume_with_another_number_of_ranks(self):
        words = ["homework2_combined", "--accum-steps", "2", "--amp", "bf16", "--optimizer", "adamw"]
        whole, losses = self.weights(1, *words, "--steps", "30")
        for before, after in ((4, 1), (1, 3)):
            with self.subTest(before=before, after=after):
                folder = ["--checkpoint", self.path(f"run-{before}"), "--checkpoint-every", "10"]
                self.weights(before, *words, "--steps", "20", *folder)
                resumed, last_losses = self.weights(after, *words, "--steps", "30", *folder)
                self.assertEqual(resumed, whole)
                self.assertEqual(last_losses, losses[20:])

    def test_what_cannot_be_divided_is_refused(self):
        for ranks, words, text in ((3, ["--virtual-shards", "8"], "--virtual-shards 8 cannot be divided over 3 ranks"),
                                   (1, ["--virtual-shards", "7"], "--batch 48 cannot be cut into 7 equal parts"),
                                   (1, ["--virtual-shards", "8", "--compress", "bf16"], "--compress")):
            done = run(ranks, "practical6_ddp", *words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
