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
    def weights(self, ranks, program, *words, shards=12):
        """The bytes of the trained weights, and the losses."""
        saved, record = self.path("weights.safetensors"), self.path("job.json")
        done = run(ranks, program, "--virtual-shards", str(shards), "--save", saved, "--json", record, *words)
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

    def test_stages_and_data_ranks(self):
        """Stages are devices or ranks, 1 to 4 data ranks; the model has no random numbers, so that cuts agree too."""
        words = ["practical10_hybrid", "--steps", "20", "--accum-steps", "2", "--amp", "bf16", "--stages", "2"]
        alone = self.weights(1, *words)
        for ranks, more in ((2, []), (4, []), (3, ["--backend", "gloo"]), (2, ["--stages", "3", "--schedule", "gpipe"]),
                            (4, ["--place", "ranks", "--schedule", "zero-bubble", "--recompute"])):
            with self.subTest(ranks=ranks, more=more):
                self.assertEqual(self.weights(ranks, *words, *more), alone)

    def test_a_pipeline_resumes_with_another_number_of_data_ranks(self):
        words = ["practical10_hybrid", "--optimizer", "adamw"]
        whole, losses = self.weights(1, *words, "--steps", "20")
        folder = ["--checkpoint", self.path("hybrid"), "--checkpoint-every", "5"]
        self.weights(4, *words, "--steps", "10", *folder)
        self.assertEqual(self.weights(2, *words, "--steps", "20", *folder), (whole, losses[10:]))

    def test_gpt2_in_every_layout(self):
        """Dropout and clipping; ZeRO and pipelines among the layouts."""
        data = self.path("data")
        tokens = [os.path.join(BIN, "gpt2"), "tokens", __file__, "--out", data]
        subprocess.run(tokens, check=True, capture_output=True, timeout=60)
        sizes = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "16", "--batch", "12", "--accumulate", "2",
                 "--virtual-shards", "6", "--dropout", "0.1", "--steps", "8", "--validate-windows", "1"]

        def train(ranks, *words):
            out = self.path("model")
            done = subprocess.run([os.path.join(BIN, "lockstep"), "run", "-n", str(ranks), os.path.join(BIN, "gpt2"), "train",
                                   "--data", data, "--out", out, *sizes, *words], capture_output=True, text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return bytes_of(os.path.join(out, "model.safetensors"))

        for words, ranks in (([], (1, 3)), (["--shard", "3"], (1, 2)), (["--stages", "2"], (2, 4))):
            alone = train(ranks[0], *words)
            for count in ranks[1:]:
                with self.subTest(words=words, ranks=count):
                    self.assertEqual(train(count, *words), alone)

    def test_what_cannot_be_divided_is_refused(self):
        for ranks, words, text in ((3, ["--virtual-shards", "8"], "--virtual-shards 8 cannot be divided over 3 data ranks"),
                                   (2, ["--virtual-shards", "8", "--micro-batches", "4"], "--micro-batches")):
            done = run(ranks, "practical10_hybrid", *words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)
        for ranks, words, text in ((3, ["--virtual-shards", "8"], "--virtual-shards 8 cannot be divided over 3 ranks"),
                                   (1, ["--virtual-shards", "7"], "--batch 48 cannot be cut into 7 equal parts"),
                                   (1, ["--virtual-shards", "8", "--compress", "bf16"], "--compress")):
            done = run(ranks, "practical6_ddp", *words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
