"""The script that compares records of launches: what it takes for a difference. Recording needs a GPU."""

import json

import pytest
import record_launches

EVENTS = [
    {"cat": "kernel", "name": "b", "ts": 2.0, "args": {"grid": [2, 1, 1], "block": [64, 1, 1]}},
    {"cat": "gpu_memcpy", "name": "copy", "ts": 1.5, "args": {}},
    {"cat": "kernel", "name": "a", "ts": 1.0, "args": {"grid": [8, 1, 1], "block": [128, 1, 1]}},
    {"name": "no category", "ts": 0.0},
]
KERNELS = [["a", [8, 1, 1], [128, 1, 1]], ["b", [2, 1, 1], [64, 1, 1]]]
RECORD = {"shape": "x", "steps": {"one": KERNELS}, "code": {"room.a": [["()", "c0"], ["(1,)", "c1"]], "room.b": []}}


def changed(**entries) -> dict:
    return json.loads(json.dumps(RECORD | entries))


def test_kernels_are_in_the_order_of_their_begin():
    assert record_launches.kernels_of(EVENTS) == KERNELS


@pytest.mark.parametrize(
    "new, lines",
    [
        (changed(), []),
        (changed(code={"elsewhere.a": RECORD["code"]["room.a"]}), []),  # it has moved
        (changed(code={"room.a": [["()", "c0"], ["()", "c2"]]}), ["a: 1 variants are gone, 1 are new"]),
        (changed(steps={"one": KERNELS[:1]}), ["one: 2 launches are 1 now"]),
        (changed(steps={}), ["one: 2 launches are 0 now"]),
        (changed(steps={"one": KERNELS[::-1]}), ["one: 2 launches are 2 now", "one: launch 0: ", "one: launch 1: "]),
        (changed(steps={"one": KERNELS, "two": KERNELS}), ["two: 0 launches are 2 now"]),
    ],
)
def test_differences(new, lines, tmp_path, capsys):
    found = record_launches.differences(changed(), new)
    assert len(found) == len(lines) and all(line.startswith(begin) for line, begin in zip(found, lines)), found
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, record in zip(files, (RECORD, new)):
        file.write_text(json.dumps(record))
    assert record_launches.main(["compare", *map(str, files)]) == bool(lines)
    assert ("the same launches" in capsys.readouterr().out) != bool(lines)
