"""GPT-2 and its tokenizer, written from their papers for the tests of examples/gpt2: names and layout of tensors are Hugging Face's."""
import json
import math
import pathlib
import unicodedata

import torch


def weights(config, seed):
    """Random weights under the published names; linear layers are [in, out]."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.1
    width = config["n_embd"]
    tensors = {"wte.weight": draw(config["vocab_size"], width), "wpe.weight": draw(config["n_positions"], width),
               "ln_f.weight": 1 + draw(width), "ln_f.bias": draw(width)}
    for i in range(config["n_layer"]):
        block = {"ln_1.weight": 1 + draw(width), "ln_1.bias": draw(width),
                 "attn.c_attn.weight": draw(width, 3 * width), "attn.c_attn.bias": draw(3 * width),
                 "attn.c_proj.weight": draw(width, width), "attn.c_proj.bias": draw(width),
                 "ln_2.weight": 1 + draw(width), "ln_2.bias": draw(width),
                 "mlp.c_fc.weight": draw(width, 4 * width), "mlp.c_fc.bias": draw(4 * width),
                 "mlp.c_proj.weight": draw(4 * width, width), "mlp.c_proj.bias": draw(width)}
        tensors.update({f"h.{i}.{name}": tensor for name, tensor in block.items()})
    return tensors


def forward(config, tensors, tokens):
    """Logits of int64 [positions]: [positions, vocabulary]. In float64, so that its own rounding does not count."""
    get = lambda name: tensors[name].double()
    width, heads = config["n_embd"], config["n_head"]
    norm = lambda x, name: torch.nn.functional.layer_norm(x, (width,), get(name + ".weight"), get(name + ".bias"), 1e-5)
    conv = lambda x, name: x @ get(name + ".weight") + get(name + ".bias")
    length = len(tokens)
    x = get("wte.weight")[tokens] + get("wpe.weight")[:length]
    for i in range(config["n_layer"]):
        q, k, v = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(width, dim=-1)
        split = lambda t: t.view(length, heads, width // heads).transpose(0, 1)
        scores = split(q) @ split(k).transpose(1, 2) / math.sqrt(width // heads)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ split(v)).transpose(0, 1).reshape(length, width)
        x = x + conv(mixed, f"h.{i}.attn.c_proj")
        hidden = conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden ** 3)))
        x = x + conv(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ get("wte.weight").T


def byte_characters():
    """[byte] -> the character that stands for it in vocab.json."""
    visible = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + i) for i, byte in enumerate(hidden)}}


SPACES = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200b)}


def kind(character):
    if character in SPACES:
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def words(text):
    """'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces not before a word|spaces, tried in this order."""
    at = 0
    while at < len(text):
        end = next((at + len(c) for c in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(c, at)), 0)
        if not end:
            begin = at + 1 if text[at] == " " and at + 1 < len(text) and kind(text[at + 1]) != "space" else at
            end = begin + 1
            while end < len(text) and kind(text[end]) == kind(text[begin]):
                end += 1
            if kind(text[begin]) == "space" and end < len(text) and end - at > 1:
                end -= 1
        yield text[at:end]
        at = end


class Bpe:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        self.numbers = json.loads((folder / "vocab.json").read_text())
        lines = (folder / "merges.txt").read_text().splitlines()[1:]
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines)}
        self.characters = byte_characters()

    def encode(self, text):
        tokens = []
        for word in words(text):
            parts = [self.characters[byte] for byte in word.encode()]
            while len(parts) > 1:
                best = min(zip(parts, parts[1:]), key=lambda pair: self.ranks.get(pair, math.inf))
                if best not in self.ranks:
                    break
                joined, i = [], 0
                while i < len(parts):
                    if tuple(parts[i:i + 2]) == best:
                        joined.append(parts[i] + parts[i + 1])
                        i += 2
                    else:
                        joined.append(parts[i])
                        i += 1
                parts = joined
            tokens += [self.numbers[part] for part in parts]
        return tokens

    def decode(self, tokens):
        byte_of = {character: byte for byte, character in self.characters.items()}
        names = {number: name for name, number in self.numbers.items()}
        return bytes(byte_of[c] for token in tokens for c in names[token] if names[token] != "<|endoftext|>")
