#!/usr/bin/env python3
"""examples/gpt2 against an independent GPT-2 in PyTorch, and every layout against one rank:
gpt2_parity.py BIN_DIR SOURCE_DIR CASE."""
import array
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print("python3-torch is missing: apt-get install python3-torch")
    sys.exit(77)

import gpt2_model
import safetensors_io

TINY = ["--layers", "2", "--heads", "4", "--width", "32", "--context", "24", "--batch", "8", "--lr", "3e-3",
        "--warmup", "2", "--log-every", "1"]
TRICKY = ("It's  we'll\tI'd 3½ Ⅷ  x²\n\n naïve Straße 中文字 ١٢٣ e\u0301 \u00a0\u2003wide\r\n    def f(x):\n"
          "        return 'x'  # done\n\n\n\U0001f600🙂 ok   ")


class Check:
    def __init__(self, binaries, sources, folder):
        self.binaries, self.sources, self.folder = binaries, sources, folder

    def run(self, *arguments, ranks=1, succeeds=True):
        command = [str(self.binaries / "gpt2"), *map(str, arguments)]
        if ranks > 1:
            command = [str(self.binaries / "lockstep"), "run", "-n", str(ranks), *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        if (done.returncode == 0) != succeeds:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + ("" if succeeds else done.stderr)

    def make_tokens(self, vocabulary=300):
        data = self.folder / "data"
        self.run("tokens", *sorted(self.sources.glob("docs/*.md"))[:6], "--out", data, "--vocabulary", vocabulary)
        # Twenty windows of the context of TINY, and one that is shorter: evaluation sees two shapes.
        held_out = (data / "val.bin").read_bytes()[:2 * (20 * 24 + 8)]
        assert len(held_out) == 2 * 488
        (data / "val.bin").write_bytes(held_out)
        return data

    def tokenizer(self):
        """Words, merges and numbers are those of an independent BPE, and decoding gives the text back."""
        data = self.make_tokens(700)
        text = TRICKY + (self.sources / "docs/index.md").read_text()
        (self.folder / "text").write_bytes(text.encode())
        again = self.folder / "again"
        self.run("tokens", self.folder / "text", "--out", again, "--tokenizer", data, "--held-out", "0")
        tokens = array.array("H", (again / "train.bin").read_bytes()).tolist()
        bpe = gpt2_model.Bpe(data)
        assert "".join(gpt2_model.words(text)) == text
        assert tokens == bpe.encode(text) + [699], "tokens differ from those of an independent BPE"
        assert bpe.decode(tokens) == text.encode()
        assert len(tokens) < len(text) / 1.8, f"{len(tokens)} tokens for {len(text)} characters"
        # Bytes that are not UTF-8 survive.
        (self.folder / "bytes").write_bytes(bytes(range(256)) * 2)
        self.run("tokens", self.folder / "bytes", "--out", again, "--tokenizer", data, "--held-out", "0")
        assert bpe.decode(array.array("H", (again / "train.bin").read_bytes()).tolist()) == bytes(range(256)) * 2

    def losses(self, data, *flags, ranks=1):
        text = self.run("train", "--data", data, *TINY, "--steps", "4", *flags, ranks=ranks)
        return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)]

    def layouts(self):
        """Losses, clipping and validation of every layout are those of one rank."""
        data = self.make_tokens()
        expected = self.losses(data)
        assert len(expected) == 5 and expected[0] > expected[3], expected
        assert abs(expected[0] - math.log(300)) < 0.2, expected
        rows = [(1, ["--accumulate", "2"]), (2, []), (2, ["--accumulate", "2"]), (2, ["--tensor-parallel", "2"]),
                (2, ["--tensor-parallel", "2", "--sequence-parallel"]), (3, ["--tensor-parallel", "3"]),
                (2, ["--stages", "2"]), (3, ["--stages", "3", "--micro-batches", "4"]),
                (4, ["--stages", "2", "--accumulate", "2", "--micro-batches", "2"]),
                (4, ["--stages", "2", "--tensor-parallel", "2", "--sequence-parallel"]),
                (4, ["--tensor-parallel", "2", "--sequence-parallel"]), (2, ["--shard", "1"]),
                (2, ["--shard", "2", "--accumulate", "2"]), (2, ["--shard", "3"]),
                (4, ["--shard", "3", "--tensor-parallel", "2", "--sequence-parallel"]),
                (4, ["--shard", "1", "--stages", "2", "--accumulate", "2", "--micro-batches", "2"]),
                (4, ["--shard", "3", "--stages", "2"]),
                (8, ["--shard", "2", "--stages", "2", "--tensor-parallel", "2", "--sequence-parallel"])]
        for ranks, flags in rows:
            found = self.losses(data, *flags, ranks=ranks)
            close = all(abs(a - b) < 3e-5 * b for a, b in zip(found, expected)) and len(found) == len(expected)
            print(ranks, *flags, found)
            assert close, f"{ranks} ranks, {flags}: {found} instead of {expected}"
        dropped = self.losses(data, "--dropout", "0.2")
        assert dropped != expected
        for flags in (["--tensor-parallel", "2"], ["--tensor-parallel", "2", "--sequence-parallel"]):
            found = self.losses(data, "--dropout", "0.2", *flags, ranks=2)
            assert all(abs(a - b) < 3e-5 * b for a, b in zip(found, dropped)), (found, dropped)
        low = self.losses(data, "--bf16")
        assert all(abs(a - b) < 0.05 for a, b in zip(low, expected)), (low, expected)

    def logits(self, model, data):
        out = self.folder / "logits"
        self.run("logits", "--model", model, "--tokens", data / "val.bin", "--out", out)
        return safetensors_io.load(out)["logits"]

    def compare_logits(self, model, data, tensors):
        config = json.loads((model / "config.json").read_text())
        tokens = array.array("H", (data / "val.bin").read_bytes()).tolist()[:config["n_positions"]]
        expected = gpt2_model.forward(config, tensors, torch.tensor(tokens))
        found = self.logits(model, data)
        assert found.shape == expected.shape
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-4), (found - expected).abs().max()
        return config, tokens, expected

    def published(self):
        """Files that we write and files that others write give the same logits here and in PyTorch."""
        data = self.make_tokens()
        for ranks, flags in ((1, []), (2, ["--tensor-parallel", "2"]), (2, ["--stages", "2"]), (2, ["--shard", "3"])):
            model = self.folder / f"model{ranks}{len(flags) and flags[0]}"
            text = self.run("train", "--data", data, *TINY, "--steps", "4", "--out", model, *flags, ranks=ranks)
            tensors = safetensors_io.load(model / "model.safetensors")
            config, tokens, _ = self.compare_logits(model, data, tensors)
            assert config["n_layer"] == 2 and len(tensors) == 4 + 2 * 12
            # The printed validation loss is that of this file.
            bits = array.array("H", (data / "val.bin").read_bytes()).tolist()
            sums, count = 0, 0
            for first in range(0, len(bits) - 1, 24):
                ids = torch.tensor(bits[first:first + 25])
                out = gpt2_model.forward(config, tensors, ids[:-1])
                sums += torch.nn.functional.cross_entropy(out, ids[1:], reduction="sum").item()
                count += len(ids) - 1
            printed = float(re.findall(r"validation loss ([0-9.]+)", text)[-1])
            assert abs(printed - sums / count) < 1e-4, (printed, sums / count)

        config = {"n_layer": 3, "n_head": 2, "n_embd": 16, "n_positions": 20, "vocab_size": 300}
        plain = gpt2_model.weights(config, 5)
        for prefix in ("", "transformer."):
            model = self.folder / f"theirs{prefix}"
            model.mkdir()
            tensors = {prefix + name: tensor for name, tensor in plain.items()}
            if prefix:
                tensors["lm_head.weight"] = plain["wte.weight"]
                tensors[prefix + "h.0.attn.bias"] = torch.ones(1, 1, 20, 20)
            safetensors_io.save(model / "model.safetensors", tensors)
            (model / "config.json").write_text(json.dumps(config))
            for name in ("vocab.json", "merges.txt"):
                shutil.copy(data / name, model)
            self.compare_logits(model, data, plain)
        # Loading and writing changes no bit.
        again = self.folder / "again"
        self.run("train", "--data", data, "--init", model, "--steps", "0", "--out", again)
        written = safetensors_io.load(again / "model.safetensors")
        assert written.keys() == plain.keys()
        assert all(torch.equal(written[name], plain[name]) for name in plain)
        self.sampling(model, config, plain, data)
        tensors["lm_head.weight"] = plain["wte.weight"] + 1
        safetensors_io.save(model / "model.safetensors", tensors)
        text = self.run("sample", "--model", model, "--prompt", "a", succeeds=False)
        assert "lm_head.weight that is not wte.weight" in text, text

    def sampling(self, model, config, tensors, data):
        """The likeliest tokens, with a cache and past the end of the context."""
        bpe = gpt2_model.Bpe(data)
        seen = bpe.encode("The rank")
        context, written = list(seen), []
        for _ in range(30):
            if len(context) > config["n_positions"]:
                context = (seen + written)[-(config["n_positions"] // 2):]
            token = gpt2_model.forward(config, tensors, torch.tensor(context))[-1].argmax().item()
            if token == bpe.numbers["<|endoftext|>"]:
                break
            written.append(token)
            context.append(token)
        expected = "The rank".encode() + bpe.decode(written) + b"\n"
        command = [str(self.binaries / "gpt2"), "sample", "--model", str(model), "--prompt", "The rank", "--count", "30"]
        done = subprocess.run([*command, "--temperature", "0"], capture_output=True, timeout=100, check=True)
        assert done.stdout == expected, (done.stdout, expected)
        warm = [subprocess.run([*command, "--top-k", "5", "--seed", seed], capture_output=True, check=True).stdout
                for seed in ("1", "1", "2")]
        assert warm[0] == warm[1] != warm[2], warm

    def resume(self):
        """A run that goes on from a checkpoint ends with the bits of one that was not stopped."""
        data = self.make_tokens()
        for ranks, flags in ((1, []), (2, ["--tensor-parallel", "2", "--sequence-parallel"]), (2, ["--stages", "2"]),
                             (2, ["--shard", "3"]), (4, ["--shard", "2", "--stages", "2"])):
            runs = self.folder / f"runs{len(flags)}{flags[0] if flags else ''}"
            arguments = ["train", "--data", data, *TINY, "--steps", "6", "--dropout", "0.1", "--checkpoint", runs,
                         "--save-every", "2", "--out", runs / "model", *flags]
            self.run(*arguments, ranks=ranks)
            weights = safetensors_io.load(runs / "model/model.safetensors")
            saved = sorted(path for path in runs.iterdir() if re.search(r"\d+$", path.name))
            assert len(saved) == 3, list(runs.iterdir())
            shutil.rmtree(saved[-1])
            shutil.rmtree(saved[-2])
            text = self.run(*arguments, ranks=ranks)
            assert "resumed after step 2" in text, text
            again = safetensors_io.load(runs / "model/model.safetensors")
            assert all(torch.equal(again[name], weights[name]) for name in weights), flags

    def mistakes(self):
        data = self.make_tokens()
        for flags, words in ((["--stages", "2"], ["1 rank cannot", "multiple of 2"]),
                             (["--shard", "4"], ["--shard"]),
                             (["--batch", "7", "--accumulate", "2"], ["--batch 7", "multiple of 2"]),
                             (["--data", "/nonexistent"], ["train.bin", "gpt2 tokens"]),
                             (["--vocabulary", "100"], ["the vocabulary has 100"]),
                             (["--out", "/proc/model"], ["--out /proc/model", "may write to"]),
                             (["--heads", "5"], ["width 32", "5 heads"])):
            given = ["--data", data, *TINY]
            for flag in flags[::2]:
                at = given.index(flag) if flag in given else len(given)
                del given[at:at + 2]
            text = self.run("train", *given, *flags, succeeds=False)
            assert all(word in text for word in words), text
        odd = [flag if flag != "24" else "25" for flag in TINY]
        text = self.run("train", "--data", data, *odd, "--steps", "1", "--tensor-parallel", "2", "--sequence-parallel",
                        ranks=2, succeeds=False)
        assert "25 positions" in text, text


def main():
    binaries, sources, case = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as folder:
        getattr(Check(binaries, sources, pathlib.Path(folder)), case)()
    print("ok")


if __name__ == "__main__":
    main()
