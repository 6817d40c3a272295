"""Manifests and files made by a stranger: refused quickly, and nothing in them is ever executed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import time

import pytest

from boost.checkpoint.manifest import MAX_MANIFEST_BYTES, to_json
from boost.checkpoint.store import open_checkpoint
from boost.errors import UserError


@pytest.fixture
def saved(kit, root):
    kit.save_all(root, 5, kit.make_tensors(), (2,), 2)
    return root / "step-5"


def lines_hash(tensors):
    digest = hashlib.sha256()
    for t in sorted(tensors, key=lambda t: (t["name"], t["kind"])):
        shape = "x".join(map(str, t["shape"])) or "scalar"
        digest.update(f"{t['name']} {t['kind']} {t['dtype']} {shape} {t['sha256']}\n".encode())
    return digest.hexdigest()


def forge(saved, change):
    """Changes the manifest and makes all its checksums right again."""
    path = saved / "manifest.json"
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    change(body)
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        body["state_hash"] = lines_hash(body["tensors"])
    path.write_bytes(to_json({**body, "manifest_sha256": hashlib.sha256(to_json(body)).hexdigest()}))


def refused(saved, *words):
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        open_checkpoint(saved)
    assert time.process_time() - started < 2
    assert len(str(caught.value)) < 600
    for word in words:
        assert word in str(caught.value)


def test_forging_keeps_a_good_manifest_good(saved):
    forge(saved, lambda body: None)
    open_checkpoint(saved)


NAMES = ["../secret", "/etc/passwd", "a/../../b", "..", ".", "", "a\0b", "a\\b", "x" * 300, "manifest.json"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_that_lead_elsewhere(saved, name):
    (saved.parent / "secret").write_bytes(b"x")
    entry = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    forge(saved, lambda body: body["files"].update({name: entry}))
    refused(saved, "manifest.json")


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "../../outside"])
def test_links_that_leave(saved, target):
    (saved.parent / "outside").write_bytes((saved / "config.yaml").read_bytes())
    (saved.parent.parent / "outside").write_bytes((saved / "config.yaml").read_bytes())
    (saved / "config.yaml").unlink()
    (saved / "config.yaml").symlink_to(target)
    refused(saved, "config.yaml")


def test_links_that_stay_and_special_files(saved):
    (saved / "config.yaml").rename(saved / "real.yaml")
    (saved / "config.yaml").symlink_to("real.yaml")
    open_checkpoint(saved)
    (saved / "config.yaml").unlink()
    os.mkfifo(saved / "config.yaml")
    refused(saved, "config.yaml", "not a regular file")
    (saved / "config.yaml").unlink()
    (saved / "config.yaml").symlink_to("config.yaml")
    refused(saved, "config.yaml")


def test_other_format_versions_are_named(saved):
    for version in (2, 0, "1", True, None, 10**30):
        forge(saved, lambda body, version=version: body.update(format_version=version))
        refused(saved, "format_version", "expected 1")
    forge(saved, lambda body: body.pop("format_version"))
    refused(saved, "format_version")


def tensor(body, name="embedding.weight", kind="parameter"):
    return next(t for t in body["tensors"] if (t["name"], t["kind"]) == (name, kind))


CHANGES = {
    "gap": lambda b: tensor(b)["slices"].pop(),
    "overlap": lambda b: tensor(b)["slices"].append(tensor(b)["slices"][0]),
    "outside": lambda b: tensor(b)["slices"][0].update(offsets=[100, 0]),
    "negative": lambda b: tensor(b)["slices"][0].update(offsets=[-1, 0]),
    "huge offset": lambda b: tensor(b)["slices"][0].update(offsets=[10**18, 0]),
    "huge shape": lambda b: tensor(b).update(shape=[2**40, 2**40]),
    "big shape": lambda b: tensor(b).update(shape=[2**50, 6]),
    "float shape": lambda b: tensor(b).update(shape=[7.0, 6]),
    "bool shape": lambda b: tensor(b).update(shape=[True, 6]),
    "text shape": lambda b: tensor(b).update(shape="76"),
    "many dimensions": lambda b: tensor(b).update(shape=[1] * 100_000),
    "dimensions differ": lambda b: tensor(b)["slices"][0].update(offsets=[0]),
    "dtype": lambda b: tensor(b).update(dtype="PICKLE"),
    "dtype list": lambda b: tensor(b).update(dtype=["F32"]),
    "unlisted file": lambda b: tensor(b)["slices"][0].update(file="../x.safetensors"),
    "key": lambda b: tensor(b)["slices"][0].update(key=7),
    "key of control characters": lambda b: tensor(b)["slices"][0].update(key="\0"),
    "twice": lambda b: b["tensors"].append(tensor(b)),
    "extra field": lambda b: tensor(b).update(code="print()"),
    "missing field": lambda b: tensor(b).pop("sha256"),
    "bad hash": lambda b: tensor(b).update(sha256="0"),
    "name": lambda b: tensor(b).update(name="a b"),
    "name is a list": lambda b: tensor(b).update(name=["a"]),
    "negative step": lambda b: b.update(step=-5),
    "absurd step": lambda b: b.update(step=10**100),
    "tensors is no list": lambda b: b.update(tensors={}),
    "tensor is no object": lambda b: b.update(tensors=[[]]),
    "files is no object": lambda b: b.update(files=[]),
    "negative size": lambda b: b["files"]["state.json"].update(size=-1),
    "no state": lambda b: b["files"].pop("state.json"),
    "nested": lambda b: tensor(b).update(shape=json.loads("[" * 500 + "]" * 500)),
    "million tensors": lambda b: b.update(tensors=[{"kind": 1}] * 1_000_000),
    "million files": lambda b: b.update(files={str(i): 0 for i in range(1_000_000)}),
    "million pieces": lambda b: tensor(b).update(slices=[0] * 1_000_000),
    "million numbers": lambda b: tensor(b).update(shape=list(range(1_000_000))),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_absurd_content(saved, change):
    forge(saved, change)
    refused(saved, "step-5")


def test_state_hash_must_match_the_tensors(saved):
    path = saved / "manifest.json"
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    body["state_hash"] = "0" * 64
    path.write_bytes(to_json({**body, "manifest_sha256": hashlib.sha256(to_json(body)).hexdigest()}))
    refused(saved, "state_hash")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"7",
        b"null",
        b'{"format_version": NaN}',
        b'{"format_version": 1e999}',
        b'{"format_version": 1, "format_version": 1}',
        b'{"a":' * 100_000,
        b"[" * 10_000_000,
        b"{" * 10_000_000,
        b'{"format_version": 1, "step": ' + b"9" * 100_000 + b"}",
        b'{"format_version": 1, "a": "\\ud800"}',
        b'{"format_version": 1, "a": [' + b"0," * 30_000_000 + b"0]}",
        pickle.dumps({"format_version": 1}),
        b"[" * 900 + b"]" * 900,
    ],
    ids=range(17),
)
def test_malformed_json(saved, data):
    (saved / "manifest.json").write_bytes(data)
    refused(saved, "manifest.json")


def test_too_big_is_refused_unread(saved):
    with open(saved / "manifest.json", "r+b") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    refused(saved, "manifest.json", "too big")


def test_files_that_do_not_hold_what_the_manifest_says(saved):
    """All checksums are right here; only the safetensors headers tell."""
    forge(saved, lambda b: tensor(b)["slices"][0].update(key="parameter/nowhere"))
    with pytest.raises(UserError, match=r"tensors-0000\d"):
        open_checkpoint(saved).tensor("embedding.weight")
    forge(saved, lambda b: tensor(b)["slices"][0].update(key="exp_avg_sq/embedding.weight"))
    with pytest.raises(UserError, match=r"not what the manifest says \(expected F32 \[4, 6\], got F64"):
        open_checkpoint(saved).tensor("embedding.weight")
    for header in (2**63, 33 << 20, 10**6):
        data = header.to_bytes(8, "little") + b" " * 1000
        (saved / "tensors-00000.safetensors").write_bytes(data)
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        forge(saved, lambda b, entry=entry: b["files"].update({"tensors-00000.safetensors": entry}))
        with pytest.raises(UserError, match=r"tensors-00000.*absurd header"):
            open_checkpoint(saved).tensor("embedding.weight", "exp_avg")


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_any_file_never_runs(saved, tmp_path):
    flag = tmp_path / "executed"
    data = pickle.dumps(Payload(flag))
    for name in sorted(os.listdir(saved)):
        whole = (saved / name).read_bytes()
        manifest = (saved / "manifest.json").read_bytes()
        (saved / name).write_bytes(data)
        if name != "manifest.json":
            entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            forge(saved, lambda b, name=name, entry=entry: b["files"].update({name: entry}))
        # The configuration is handed over as bytes and read by nobody here.
        with contextlib.nullcontext() if name == "config.yaml" else pytest.raises(UserError, match=name):
            checkpoint = open_checkpoint(saved)
            for kind, tensor_name in checkpoint.tensors:
                checkpoint.tensor(tensor_name, kind)
        assert not flag.exists()
        (saved / name).write_bytes(whole)
        (saved / "manifest.json").write_bytes(manifest)
    pickle.loads(data)
    assert flag.exists()
