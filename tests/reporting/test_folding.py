"""Layers that are shown as one: blocks that repeat, patterns of blocks, blocks within blocks."""

from pipepart.reporting.folding import fold


def labels(names: list[str], kinds: list[str] | None = None) -> list[str]:
    return [each.label for each in fold(names, kinds or [])]


def test_blocks_within_a_block_are_found():
    names = ["stages.0.down", *(f"stages.0.blocks.{block}.{part}" for block in range(4) for part in "ab")]
    assert labels([*names, "stages.1.down"]) == [
        "stages.0.down",
        "stages.0.blocks.0.a – 3.b, 4 × 2 alike",
        "stages.1.down",
    ]


def test_every_layer_is_in_one_fold_whatever_its_name():
    names = ["", ".", "7", "a.b.", "x9y", "1.", "2.", "\n3", "3", "4.4.4", "4.4.5", "4.5", "8", "9"]
    found = fold(names)
    assert [each.first for each in found] == [
        sum(other.layers for other in found[:at]) for at in range(len(found))
    ]
    assert sum(each.layers for each in found) == len(names)
    assert fold([]) == []
