"""Layers that are shown as one: blocks that repeat, patterns of blocks, blocks within blocks."""

from pipepart.reporting.folding import fold, span


def labels(names: list[str], kinds: list[str] | None = None) -> list[str]:
    return [each.label for each in fold(names, kinds or [])]


def test_a_transformer_is_three_lines():
    parts = ("norm", "attention", "mlp")
    layers = [f"model.layers.{block}.{part}" for block in range(32) for part in parts]
    found = fold(["model.embed", *layers, "lm_head"])
    assert [each.label for each in found] == [
        "model.embed",
        "model.layers.0.norm – 31.mlp, 32 × 3 alike",
        "lm_head",
    ]
    assert [(each.first, each.layers) for each in found] == [(0, 1), (1, 96), (97, 1)]


def test_a_chain_of_alternating_layers_is_one_line():
    names = [str(number) for number in range(1000)]
    assert labels(names, ["Linear", "ReLU"] * 500) == ["0 – 999, 500 × 2 alike"]


def test_blocks_of_other_kinds_and_few_blocks_stay_apart():
    assert labels(["0", "1", "2", "3", "4"], ["Conv"] * 4 + ["Pool"]) == ["0 – 3, 4 alike", "4"]
    assert labels(["0", "1", "2"]) == ["0", "1", "2"]


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


def test_a_span_names_the_ends_of_what_is_not_alike():
    assert span(["h.0.attention", "h.0.mlp", "h.1.attention"]) == "h.0.attention – 1.attention"
    assert span(["norm"]) == "norm"
