"""Checkpoints of lockstep in PyTorch, and PyTorch's in lockstep. Needs torch only.

    import lockstep_checkpoint as lockstep

    lockstep.load("runs/a/step-00000100", model, optimizer)   # from lockstep
    lockstep.save("files", model, optimizer)                  # for lockstep:
    # $ lockstep ckpt import runs/a --step 100 files/*.safetensors --values files/values.json

Parts have the names that the C++ program gave them: "model" and "optimizer" unless said otherwise. The bytes are not
compared with their checksums here; `lockstep ckpt verify` does that.
"""

import json
import os
import struct

import torch

_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
           "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_file(path):
    """All tensors of a safetensors file by name."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        flat = torch.frombuffer(data[begin:end], dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def write_file(path, tensors):
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        blob = bytes(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else b""
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_manifest(folder):
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        return json.load(file)["manifest"]


def read_part(folder, part):
    """The tensors of one part, whole, also where ranks have written slices of them."""
    files, tensors = {}, {}
    for entry in read_manifest(folder)["tensors"]:
        if entry["section"] != part:
            continue
        whole = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        for piece in entry["pieces"]:
            name = piece["file"]
            if name not in files:
                files[name] = read_file(os.path.join(folder, name))
            stored = files[name][entry["name"]]
            for block in piece.get("blocks", []):
                target, source = whole, stored
                if len(block["shape"]) != whole.dim():  # a range of elements
                    target, source = whole.view(-1), stored.view(-1)
                for dim, size in enumerate(block["shape"]):
                    target = target.narrow(dim, block["whole"][dim], size)
                    source = source.narrow(dim, block["local"][dim], size)
                target.copy_(source)
            if "blocks" not in piece:
                whole = stored
        tensors[entry["name"]] = whole
    return tensors


def _parameter_names(model, optimizer):
    """Names of the optimizer's parameters, in the order by which PyTorch's state_dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_state(folder, model, optimizer, part="optimizer"):
    """A state_dict for optimizer.load_state_dict()."""
    manifest, tensors = read_manifest(folder), read_part(folder, part)
    state = optimizer.state_dict()
    value = manifest["values"][part]
    groups = (value["all"] if "all" in value else value["ranks"][0])["groups"]
    if len(groups) != len(state["param_groups"]):
        raise ValueError(f"{folder}: {part} has {len(groups)} parameter groups, and this optimizer has "
                         f"{len(state['param_groups'])}")
    for ours, saved in zip(state["param_groups"], groups):
        ours.update({key: tuple(value) if key == "betas" else value for key, value in saved.items() if key in ours})
    for number, name in enumerate(_parameter_names(model, optimizer)):
        prefix = f"{part}.state.{name}."
        fields = {key[len(prefix):]: tensor for key, tensor in tensors.items()
                  if key.startswith(prefix) and "." not in key[len(prefix):]}
        if "step" in fields:  # PyTorch counts in a float tensor
            fields["step"] = fields["step"].to(torch.float32)
        if fields:
            state["state"][number] = fields
        else:  # saved before the first update
            state["state"].pop(number, None)
    return state


def load(folder, model, optimizer=None, model_part="model", optimizer_part="optimizer"):
    """Loads a checkpoint of lockstep; raises if the model is another."""
    model.load_state_dict(read_part(folder, model_part))
    if optimizer is not None:
        optimizer.load_state_dict(optimizer_state(folder, model, optimizer, optimizer_part))


def save(folder, model, optimizer=None, model_part="model", optimizer_part="optimizer"):
    """Writes the files from which `lockstep ckpt import` makes a checkpoint. The optimizer is SGD, Adam, AdamW, Adagrad
    or RMSprop."""
    os.makedirs(folder, exist_ok=True)
    write_file(os.path.join(folder, f"{model_part}.safetensors"), model.state_dict())
    values = {}
    if optimizer is not None:
        tensors = {}
        state = optimizer.state_dict()
        for number, name in enumerate(_parameter_names(model, optimizer)):
            for field, value in state["state"].get(number, {}).items():
                if value is None:  # SGD without momentum
                    continue
                if field == "step":
                    value = torch.tensor(int(value), dtype=torch.int64)
                tensors[f"{optimizer_part}.state.{name}.{field}"] = value
        write_file(os.path.join(folder, f"{optimizer_part}.safetensors"), tensors)
        known = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "amsgrad", "lr_decay",
                 "initial_accumulator_value", "alpha", "centered")
        groups = [{key: value for key, value in group.items() if key in known} for group in state["param_groups"]]
        values[optimizer_part] = {"kind": type(optimizer).__name__, "groups": groups}
    with open(os.path.join(folder, "values.json"), "w", encoding="utf-8") as file:
        json.dump(values, file)
