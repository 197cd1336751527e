"""Manifests: written, read back, and refused when they are something else."""

from __future__ import annotations

import json

import pytest

import moe_telemetry as mt
from moe_telemetry.trace.manifest import LeftOut, Manifest, TracedRouter, manifest_name

MANIFEST = Manifest(
    run="run-1",
    model="TinyMoe",
    rank=3,
    world_size=4,
    token_group=2,
    routers=(
        TracedRouter(key=mt.RouterKey("decoder", 2), num_experts=8, top_k=2),
        TracedRouter(key=mt.RouterKey("mtp0", 0), num_experts=16, score_function="sigmoid", is_biased=True),
    ),
    tensors=("scores",),
    every_n_steps=5,
    max_steps=2,
    max_tokens_per_step=100,
    is_complete=True,
    left_out=LeftOut(calls_behind=1, tokens_over_limit=7),
    silent_routers=(mt.RouterKey("mtp0", 0),),
)


def test_a_manifest_is_read_back_as_it_was_written() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert manifest_name(3) == "manifest-00003.json"


def test_fields_that_a_later_version_added_are_ignored_and_those_it_lacks_are_defaults() -> None:
    values = json.loads(MANIFEST.to_json())
    values["new"] = values["left_out"]["new"] = values["routers"][0]["new"] = 1
    del values["silent_routers"], values["left_out"]["calls_in_graphs"]
    read = Manifest.from_json(json.dumps(values))
    assert (read.routers, read.left_out, read.silent_routers) == (MANIFEST.routers, MANIFEST.left_out, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the manifest of a route trace: ''"),
        ("[1]", "not the manifest of a route trace: '\\[1\\]'"),
        ('{"run": "a"}', "not the manifest"),
        ('{"format": 2}', "the trace has format 2; this version reads 1"),
        ('{"format": 1, "run": "a"}', "the manifest is damaged: 'routers'"),
        (MANIFEST.to_json().replace("decoder.2", "decoder"), "the manifest is damaged: router key 'decoder'"),
        (MANIFEST.to_json().replace("decoder.2", "mtp0.0"), "the manifest is damaged: two of its routers have one key"),
        (MANIFEST.to_json().replace(": 16", ": 0"), "damaged: 'num_experts' is 0; expected a whole number, 1 to"),
        (MANIFEST.to_json().replace(": 16", f": {10**12}"), f"damaged: 'num_experts' is {10**12}; expected"),
        (MANIFEST.to_json().replace('"world_size": 4', '"world_size": "4"'), "damaged: 'world_size' is '4'; expected"),
        (
            MANIFEST.to_json().replace('"world_size": 4', f'"world_size": {10**9}'),
            "'world_size' is 1000000000",
        ),
        (MANIFEST.to_json().replace('"rank": 3', '"rank": 4'), "damaged: 'rank' is 4; expected a whole number, 0 to 3"),
        (MANIFEST.to_json().replace('"calls_behind": 1', '"calls_behind": "x"'), "damaged: 'calls_behind' is 'x'"),
    ],
)
def test_another_text_is_refused_by_what_it_is(text: str, message: str) -> None:
    with pytest.raises(mt.TraceError, match=message):
        Manifest.from_json(text)


def test_what_was_left_out_is_a_sentence_and_a_loss_only_where_nobody_asked_for_it() -> None:
    assert str(LeftOut()) == "nothing"
    assert str(MANIFEST.left_out) == "calls behind: 1, tokens over limit: 7"
    assert MANIFEST.left_out.has_losses
    assert not LeftOut(tokens_over_limit=7, calls_of_other_steps=2).has_losses
